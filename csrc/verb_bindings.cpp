#include "verb_bindings.h"

#include <pybind11/stl.h>

#include "process_group/process_group.h"

namespace py = pybind11;

namespace multicomm {
namespace {

using HandlePtr = ProcessGroupMulticomm::HandlePtr;
using Tensors = ProcessGroupMulticomm::Tensors;

// Their numbers in Python, multicomm.ReduceOp: those that Horovod's users may have written down.
ReduceOp reduce_op(int number) {
  switch (number) {
    case 0: return ReduceOp::kAvg;
    case 1: return ReduceOp::kSum;
    case 3: return ReduceOp::kMin;
    case 4: return ReduceOp::kMax;
    case 5: return ReduceOp::kProduct;
    default: break;
  }
  throw py::value_error("multicomm: op must be multicomm.Average, Sum, Min, Max or Product");
}

VerbOptions options_of(int op, double before, double after, const char* name, bool grouped, bool in_place) {
  return {reduce_op(op), before, after, name, grouped, in_place};
}

py::object wait_for(const Handle& handle) {
  {
    const py::gil_scoped_release no_gil;
    handle.wait();
  }
  switch (handle.form()) {
    case Handle::Form::kNothing: break;
    case Handle::Form::kTensor: return py::cast(handle.result(0));
    case Handle::Form::kPair: return py::make_tuple(handle.result(0), handle.second());
    case Handle::Form::kList: {
      py::list results;
      for (size_t i = 0; i < handle.size(); ++i) results.append(py::cast(handle.result(i)));
      return results;
    }
  }
  return py::none();
}

}  // namespace

void bind_verbs(py::module_& module, py::object process_group) {
  py::class_<Handle, std::shared_ptr<Handle>>(module, "Handle",
                                              "An asynchronous operation, for poll() and synchronize().")
      .def("poll", &Handle::poll)
      .def("wait", &wait_for);

  using Group = ProcessGroupMulticomm;
  using Class = py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::reinterpret_borrow<Class>(process_group)
      .def(
          "verb_all_reduce",
          [](Group& group, const at::Tensor& tensor, int op, double before, double after, const char* name,
             bool in_place) {
            return group.verb_all_reduce({tensor}, options_of(op, before, after, name, false, in_place));
          },
          without_gil)
      .def(
          "verb_grouped_all_reduce",
          [](Group& group, const Tensors& tensors, int op, double before, double after, const char* name,
             bool in_place) {
            return group.verb_all_reduce(tensors, options_of(op, before, after, name, true, in_place));
          },
          without_gil)
      .def(
          "verb_reduce_scatter",
          [](Group& group, const Tensors& tensors, int op, double before, double after, const char* name,
             bool grouped) {
            return group.verb_reduce_scatter(tensors, options_of(op, before, after, name, grouped, false));
          },
          without_gil)
      .def(
          "verb_broadcast",
          [](Group& group, const Tensors& tensors, int root, const char* name, bool grouped, bool in_place) {
            return group.verb_broadcast(tensors, root, {ReduceOp::kNone, 1, 1, name, grouped, in_place});
          },
          without_gil)
      .def(
          "verb_all_gather",
          [](Group& group, const Tensors& tensors, const char* name, bool grouped) {
            return group.verb_all_gather(tensors, {ReduceOp::kNone, 1, 1, name, grouped, false});
          },
          without_gil)
      .def(
          "verb_all_to_all",
          [](Group& group, const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* name) {
            return group.verb_all_to_all(tensor, splits, {ReduceOp::kNone, 1, 1, name, false, false});
          },
          without_gil)
      .def("verb_barrier", &Group::verb_barrier, without_gil);
}

}  // namespace multicomm
