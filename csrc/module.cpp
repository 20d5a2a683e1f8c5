// Python bindings.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bootstrap/host_identity.h"
#include "process_group/process_group.h"
#include "process_group/store_adapter.h"
#include "verb_bindings.h"

namespace py = pybind11;
using multicomm::ProcessGroupMulticomm;
using multicomm::Runtime;

namespace {

// Ctrl-C inside wait(): lets Python run its signal handlers now and then.
void check_signals() {
  thread_local auto last = std::chrono::steady_clock::now();
  const auto now = std::chrono::steady_clock::now();
  if (now - last < std::chrono::milliseconds(100)) return;
  last = now;
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Called without the GIL, on a thread that Python does not know.
std::string main_thread_stack() {
  const py::gil_scoped_acquire gil;
  return py::module_::import("multicomm._stack").attr("main_thread")().cast<std::string>();
}

py::dict statistics() {
  py::dict all;
  const Runtime* runtime = Runtime::if_made();
  if (runtime == nullptr) return all;
  for (const auto& group : const_cast<Runtime*>(runtime)->coordinator().groups()) {
    const multicomm::GroupStatistics s = group->statistics();
    py::dict entry;
    entry["ranks"] = group->info().ranks;
    entry["operations"] = s.operations;
    entry["bytes"] = s.bytes;
    entry["rounds"] = s.rounds;
    entry["batches"] = s.batches;
    entry["batched_operations"] = s.batched_operations;
    entry["inline_operations"] = s.inline_operations;
    entry["point_to_point"] = s.point_to_point;
    all[py::str(group->info().name)] = entry;
  }
  return all;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::module_::import("torch._C._distributed_c10d");  // the base classes' types
  Runtime::set_interrupt_check(check_signals);
  multicomm::StackReader::set_reader(main_thread_stack);

  py::class_<multicomm::MulticommOptions, c10d::Backend::Options, c10::intrusive_ptr<multicomm::MulticommOptions>>(
      m, "Options")
      .def(py::init<std::chrono::milliseconds>(), py::arg("timeout") = kBackendDefaultTimeout)
      .def("__copy__",
           [](const multicomm::MulticommOptions& o) { return c10::make_intrusive<multicomm::MulticommOptions>(o); })
      .def("__deepcopy__", [](const multicomm::MulticommOptions& o, const py::dict&) {
        return c10::make_intrusive<multicomm::MulticommOptions>(o);
      });

  py::class_<ProcessGroupMulticomm, c10d::Backend, c10::intrusive_ptr<ProcessGroupMulticomm>> process_group(
      m, "ProcessGroupMulticomm");
  process_group
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const std::vector<int>& global_ranks, int world_rank, int world_size, const std::string& name,
                       const std::string& server_executable,
                       const c10::intrusive_ptr<multicomm::MulticommOptions>& options) {
             const py::gil_scoped_release no_gil;
             return c10::make_intrusive<ProcessGroupMulticomm>(
                 multicomm::GroupDescription{store, rank, size, global_ranks, world_rank, world_size, name,
                                             server_executable},
                 options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("global_ranks"), py::arg("world_rank"),
           py::arg("world_size"), py::arg("name"), py::arg("server_executable"), py::arg("options"))
      .def_property_readonly("options", &ProcessGroupMulticomm::getBackendOptions)
      .def("_set_default_timeout", &ProcessGroupMulticomm::setTimeout, py::arg("timeout"))
      .def("get_error", &ProcessGroupMulticomm::getError)
      // MPI communicators are made by their members alone: the others have nothing to do for a split.
      .def(
          "perform_nocolor_split", [](ProcessGroupMulticomm&, const py::object&) {}, py::arg("device"))
      .def_property_readonly("_global_ranks",
                             [](const ProcessGroupMulticomm& pg) { return pg.description().global_ranks; })
      .def_property_readonly("_world_rank", [](const ProcessGroupMulticomm& pg) { return pg.description().world_rank; })
      .def_property_readonly("_world_size", [](const ProcessGroupMulticomm& pg) { return pg.description().world_size; })
      .def("_named_all_reduce", &ProcessGroupMulticomm::named_all_reduce, py::call_guard<py::gil_scoped_release>())
      .def("_named_all_gather", &ProcessGroupMulticomm::named_all_gather, py::call_guard<py::gil_scoped_release>())
      .def("_named_all_to_all", &ProcessGroupMulticomm::named_all_to_all, py::call_guard<py::gil_scoped_release>())
      .def("_next_composed", &ProcessGroupMulticomm::next_composed)
      .def("_join", &ProcessGroupMulticomm::join, py::call_guard<py::gil_scoped_release>())
      .def("abort", &ProcessGroupMulticomm::abort, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &ProcessGroupMulticomm::shutdown, py::call_guard<py::gil_scoped_release>());
  multicomm::bind_verbs(m, process_group);

  m.def("stats", &statistics, "Counters per group of this process.");
  m.def(
      "start",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, std::chrono::milliseconds timeout,
         const std::string& server_executable) {
        multicomm::bootstrap::WorldRequest request;
        request.store = multicomm::adapt_base_store(store);
        request.rank = rank;
        request.world_size = world_size;
        request.timeout = timeout;
        request.server_executable = server_executable;
        Runtime::get().start(std::move(request));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("shutdown", &Runtime::end_process, py::arg("failed"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "start_timeline",
      [](const std::string& folder, int rank, int world_size) {
        return Runtime::get().start_timeline(folder, rank, world_size);
      },
      py::arg("folder"), py::arg("rank"), py::arg("world_size"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "stop_timeline",
      [] {
        if (Runtime* runtime = Runtime::if_made()) runtime->stop_timeline();
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "mpi_world",
      [] {
        const auto& runtime = multicomm::bootstrap::start_from_mpi();
        return std::pair(runtime.rank(), runtime.size());
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "mpi_broadcast",
      [](const std::string& text) {
        return multicomm::bootstrap::broadcast_text(multicomm::bootstrap::start_from_mpi(), text);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("host_identity", &multicomm::bootstrap::host_identity);
  m.def("settings", [] {
    py::list list;
    for (const auto& setting : multicomm::describe_settings(multicomm::read_settings(environ)))
      list.append(py::make_tuple(setting.name, setting.value, setting.meaning));
    return list;
  });
  m.def("start_description", [] {
    const auto* runtime = multicomm::bootstrap::MpiRuntime::current();
    return runtime == nullptr ? std::string("MPI not started") : runtime->describe();
  });
  m.def("nodes", [] {
    std::vector<uint64_t> nodes;
    if (const auto* runtime = multicomm::bootstrap::MpiRuntime::current())
      for (const auto& peer : runtime->peers()) nodes.push_back(peer.node);
    return nodes;
  });
  m.def("launched_by_mpi", &multicomm::bootstrap::launched_by_mpi);
}
