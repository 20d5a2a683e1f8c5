// Python bindings of the package's own verbs.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace multicomm {

// Adds `Handle` to the module and the verbs, whose names begin with `verb_`, to the process group's class.
void bind_verbs(pybind11::module_& module, pybind11::object process_group);

}  // namespace multicomm
