#include "coordinator/names.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace multicomm {

uint64_t SlotSet::size() const {
  uint64_t count = 0;
  for (const uint64_t word : words) count += static_cast<uint64_t>(std::popcount(word));
  return count;
}

bool SlotSet::within(const SlotSet& other) const {
  return std::equal(std::begin(words), std::end(words), std::begin(other.words),
                    [](uint64_t mine, uint64_t theirs) { return (mine & ~theirs) == 0; });
}

void combine(const NameRecord& in, NameRecord& inout) {
  for (size_t w = 0; w < std::size(inout.submitted.words); ++w) {
    inout.submitted.words[w] &= in.submitted.words[w];
    inout.unchanged.words[w] &= in.unchanged.words[w];
  }
  const uint32_t in_count = std::min(in.fresh_count, kNewNames), own_count = std::min(inout.fresh_count, kNewNames);
  if (in_count == 0) {
    inout.fresh_count = own_count;
    return;
  }
  uint64_t merged[2 * kNewNames];
  const uint64_t* const end =
      std::set_union(in.fresh, in.fresh + in_count, inout.fresh, inout.fresh + own_count, merged);
  inout.fresh_count = std::min(static_cast<uint32_t>(end - merged), kNewNames);
  std::memcpy(inout.fresh, merged, inout.fresh_count * sizeof(uint64_t));
}

uint64_t hash_of_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return std::max<uint64_t>(mix(hash), 2);
}

uint64_t name_of(const Operation& operation) {
  if (operation.descriptor.kind == OpKind::kJoin) return kJoinName;
  return operation.name.empty() ? 0 : hash_of_name(operation.name);
}

bool NamedOperations::add(OperationPtr operation) {
  const uint64_t hash = hash_of_name(operation->name);
  Name& name = names_[hash];
  if (name.text.empty()) name.text = operation->name;
  if (name.text != operation->name) return false;
  ++waiting_;
  operation->repeated = name.head != nullptr;
  if (operation->repeated) {
    name.later.push_back(std::move(operation));
    return true;
  }
  name.head = std::move(operation);
  if (name.slot == kNoSlot) strangers_.push_back(hash);
  else unoffered_.push_back(name.slot);
  return true;
}

void NamedOperations::fill_joined(NameRecord& mine) {
  std::fill(std::begin(mine.submitted.words), std::end(mine.submitted.words), ~uint64_t{0});
  mine.unchanged = mine.submitted;
  mine.fresh_count = 0;
}

NamedOperations::Matches NamedOperations::match(const NameRecord& result, bool joined) {
  Matches matches;
  for (uint32_t w = 0; w < std::size(result.submitted.words); ++w) {
    for (uint64_t left = result.submitted.words[w]; left != 0; left &= left - 1) {
      const uint32_t slot = w * 64 + static_cast<uint32_t>(std::countr_zero(left));
      if (slot >= slots_.size()) continue;
      slots_[slot].used = ++clock_;
      const uint64_t hash = slots_[slot].hash;
      submitted_.remove(slot);
      unchanged_.remove(slot);
      Name& name = names_.at(hash);
      OperationPtr operation = take_head(name);
      if (name.head) unoffered_.push_back(slot);
      if (!joined && result.unchanged.has(slot)) matches.agreed.push_back(std::move(operation));
      else matches.submitted.push_back({slot, hash, std::move(operation)});
    }
  }
  return matches;
}

OperationPtr NamedOperations::take_head(Name& name) {
  OperationPtr operation = std::exchange(name.head, nullptr);
  if (operation) --waiting_;
  if (name.later.empty()) return operation;
  name.head = std::move(name.later.front());
  name.later.erase(name.later.begin());
  return operation;
}

std::vector<OperationPtr> NamedOperations::take_hopeless() {
  std::vector<OperationPtr> taken;
  const auto take = [&](Name& name) {  // whether nothing waits under it any more
    while (name.head && name.head->hopeless()) taken.push_back(take_head(name));
    return name.head == nullptr;
  };
  std::erase_if(unoffered_, [&](uint32_t slot) { return take(names_.at(slots_[slot].hash)); });
  std::erase_if(strangers_, [&](uint64_t hash) {
    const auto name = names_.find(hash);
    if (!take(name->second)) return false;
    names_.erase(name);
    return true;
  });
  return taken;
}

void NamedOperations::propose(NameRecord& mine) const {
  std::vector<uint64_t> distances;
  for (const uint64_t hash : strangers_) distances.push_back(hash - cursor_);
  mine.fresh_count = std::min(static_cast<uint32_t>(distances.size()), kNewNames);
  std::partial_sort_copy(distances.begin(), distances.end(), mine.fresh, mine.fresh + mine.fresh_count);
}

// A slot that nobody has, else the one that has gone unused for longest. Whoever waits under its name asks for a slot
// again.
uint32_t NamedOperations::new_slot() {
  if (slots_.size() < kNameSlots) {
    slots_.push_back({});
    return static_cast<uint32_t>(slots_.size() - 1);
  }
  const auto oldest =
      std::min_element(slots_.begin(), slots_.end(), [](const Slot& a, const Slot& b) { return a.used < b.used; });
  const auto slot = static_cast<uint32_t>(oldest - slots_.begin());
  const auto evicted = names_.find(oldest->hash);
  submitted_.remove(slot);
  unchanged_.remove(slot);
  std::erase(unoffered_, slot);
  if (evicted->second.head == nullptr) {
    names_.erase(evicted);
  } else {
    evicted->second.slot = kNoSlot;
    strangers_.push_back(oldest->hash);
  }
  return slot;
}

bool NamedOperations::learn(const NameRecord& result) {
  const size_t strangers = strangers_.size();
  const uint64_t from = cursor_;
  for (uint32_t i = 0; i < result.fresh_count; ++i) {
    const uint64_t hash = result.fresh[i] + from;
    cursor_ = hash + 1;
    const uint32_t slot = new_slot();
    slots_[slot] = {hash, ++clock_, false, {}};
    Name& name = names_[hash];
    name.slot = slot;
    if (name.head) unoffered_.push_back(slot);
    std::erase(strangers_, hash);
  }
  return result.fresh_count > 0 && (strangers == 0 || strangers_.size() < strangers);
}

void NamedOperations::agreed(const Match& match, const Descriptor& descriptor) {
  Slot& slot = slots_[match.slot];
  if (slot.hash != match.hash) return;  // given to another name in the meantime
  slot.descriptor = descriptor;
  slot.has_descriptor = true;
}

bool NamedOperations::waits_for(uint64_t hash) const {
  const auto found = names_.find(hash);
  return found != names_.end() && found->second.head != nullptr;
}

std::vector<OperationPtr> NamedOperations::take_all_but(const NameRecord& offered) {
  std::vector<OperationPtr> taken;
  unoffered_.clear();
  strangers_.clear();
  for (auto it = names_.begin(); it != names_.end();) {
    Name& name = it->second;
    const bool keep = name.slot != kNoSlot && offered.submitted.has(name.slot);
    if (!keep && name.head) taken.push_back(std::exchange(name.head, nullptr));
    taken.insert(taken.end(), name.later.begin(), name.later.end());
    name.later.clear();
    if (!keep && name.slot != kNoSlot) {
      submitted_.remove(name.slot);
      unchanged_.remove(name.slot);
    }
    it = name.head == nullptr && name.slot == kNoSlot ? names_.erase(it) : std::next(it);
  }
  waiting_ -= taken.size();
  return taken;
}

}  // namespace multicomm
