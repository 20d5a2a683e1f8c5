// A c10d store as the start-up and the group maker see it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "bootstrap/key_value_store.h"

namespace multicomm {

// `store` itself, on a connection of its own where the store has connections.
std::shared_ptr<bootstrap::KeyValueStore> adapt_store(const c10::intrusive_ptr<c10d::Store>& store);
// The store without its prefixes: what all ranks of the default world share, whichever group a rank makes first.
std::shared_ptr<bootstrap::KeyValueStore> adapt_base_store(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace multicomm
