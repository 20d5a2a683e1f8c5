// A c10d store as the start-up and the group maker see it.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bootstrap/key_value_store.h"

namespace multicomm {

// The store without its prefixes, on a connection of its own: what all ranks of the default world share, whichever
// group a rank makes first. One adapter per store, however many groups there are: each connection costs descriptors on
// both sides.
std::shared_ptr<bootstrap::KeyValueStore> adapt_base_store(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace multicomm
