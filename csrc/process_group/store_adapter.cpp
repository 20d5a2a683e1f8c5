#include "process_group/store_adapter.h"

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

namespace multicomm {
namespace {

class StoreAdapter final : public bootstrap::KeyValueStore {
 public:
  // `origin` is kept, so that its address stays its name in adapt_base_store.
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Store> origin = {})
      : store_(std::move(store)), origin_(std::move(origin)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    try {
      store_->wait({key}, timeout);
    } catch (const std::exception& error) {
      bool there = false;
      try {
        there = store_->check({key});
      } catch (const std::exception&) {
        throw std::runtime_error(std::string("the store is lost: ") + error.what());
      }
      if (!there) throw bootstrap::StoreTimeout("key '" + key + "' was not set in time");
    }
    const auto value = store_->get(key);
    return {value.begin(), value.end()};
  }
  bool check(const std::string& key) override { return store_->check({key}); }
  int64_t add(const std::string& key, int64_t amount) override { return store_->add(key, amount); }
  std::unique_ptr<bootstrap::KeyValueStore> clone() override { return std::make_unique<StoreAdapter>(store_->clone()); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Store> origin_;
};

}  // namespace

std::shared_ptr<bootstrap::KeyValueStore> adapt_base_store(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store);
  const auto base = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  static std::mutex mutex;
  static auto* adapters = new std::map<const c10d::Store*, std::weak_ptr<StoreAdapter>>();
  const std::lock_guard lock(mutex);
  auto& slot = (*adapters)[base.get()];
  auto adapter = slot.lock();
  if (!adapter) slot = adapter = std::make_shared<StoreAdapter>(base->clone(), base);
  return adapter;
}

}  // namespace multicomm
