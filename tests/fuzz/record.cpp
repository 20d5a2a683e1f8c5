// The records of three members, of any content: combining them stays inside them, and what comes out is either refused
// or safe to act on. Well-formed records combine to one result whatever the order.
#include "coordinator/record.h"

#include <algorithm>
#include <cstring>

#include "coordinator/inline_payload.h"
#include "coordinator/received.h"
#include "coordinator/reduce_kernels.h"
#include "fuzz.h"
#include "transport/transport.h"

namespace {

using namespace multicomm;
using fuzz::Reader;
using fuzz::require;

enum Mode : uint8_t { kHostile, kRaw, kWellFormed, kTable, kModes };
constexpr int kMembers = 3;
using Records = std::vector<std::unique_ptr<Record>>;  // each in a block of its own, watched by the address sanitizer

// Descriptors of any kind, shared by all members so that they agree; then every member's own payload.
Records read_records(Reader& in, bool well_formed) {
  Records records;
  Record common;
  common.group_size = in.byte() % 64 + kMembers;
  const uint32_t count = std::min<uint32_t>(in.byte(), kMaxDescriptors);
  for (uint32_t i = 0; i < count; ++i) {
    Descriptor& d = common.descriptors[i];
    d.kind = static_cast<OpKind>(in.byte());
    d.dtype = static_cast<DType>(in.byte());
    d.reduce_op = static_cast<ReduceOp>(in.byte());
    d.device = static_cast<DeviceKind>(in.byte() % 8 == 7);
    d.count = in.word();
    d.checksum = in.byte();
    if (!well_formed) continue;
    d.kind = static_cast<OpKind>(static_cast<uint8_t>(d.kind) % (static_cast<uint8_t>(OpKind::kBarrier) + 1));
    d.dtype = static_cast<DType>(static_cast<uint8_t>(d.dtype) % (static_cast<uint8_t>(DType::kOther32) + 1));
    d.reduce_op =
        static_cast<ReduceOp>(static_cast<uint8_t>(d.reduce_op) % (static_cast<uint8_t>(ReduceOp::kPremulSum) + 1));
    if (is_reduction(d.kind) && !can_reduce(d.dtype, d.reduce_op)) d = {};
  }
  std::fill(std::begin(common.repeats), std::end(common.repeats), uint16_t{1});
  common.offered = common.agreed = count;
  for (int m = 0; m < kMembers; ++m) {
    auto& record = *records.emplace_back(std::make_unique<Record>(common));
    const uint8_t step = in.byte();
    for (size_t i = 0; i < kInlineBytes; ++i) record.payload[i] = std::byte(in.done() ? i * step : in.byte());
    record.leaving = in.byte() % 2;
    const uint8_t kind = in.byte();
    if (kind % 8 == 7) record.active = 0;
    for (int n = kind % 4; n > 0; --n) record.names.submitted.put(static_cast<uint32_t>(in.word() % kNameSlots));
    record.names.fresh_count = in.byte() % 3;
    for (uint32_t i = 0; i < record.names.fresh_count; ++i) record.names.fresh[i] = i * 1000 + in.byte();
    if (well_formed && record.active == 0) {  // of one that has joined
      record.offered = record.agreed = 0;
      NamedOperations::fill_joined(record.names);
    }
    record.clock = in.byte();
    if (record.leaving != 0) record.lowest_leaving = static_cast<uint32_t>(m);
  }
  return records;
}

std::unique_ptr<Record> combined(const Record& a, const Record& b) {
  auto result = std::make_unique<Record>(b);
  combine(a, *result);
  return result;
}

void check_equal(const Record& a, const Record& b) {
  require(a.offered == b.offered && a.agreed == b.agreed && a.active == b.active, "one agreed prefix");
  require(std::memcmp(&a.names.submitted, &b.names.submitted, sizeof(SlotSet)) == 0 &&
              a.names.fresh_count == b.names.fresh_count &&
              std::equal(a.names.fresh, a.names.fresh + a.names.fresh_count, b.names.fresh),
          "one state of the names");
  require(a.leaving == b.leaving && a.lowest_leaving == b.lowest_leaving && a.lowest_failed == b.lowest_failed &&
              a.clock == b.clock,
          "one state of the members");
  InlineLayout layout(a.group_size);
  for (uint32_t i = 0; i < a.agreed; ++i) {
    require(std::memcmp(&a.descriptors[i], &b.descriptors[i], sizeof(Descriptor)) == 0, "one descriptor");
    const auto slot = layout.place(a.descriptors[i]);
    if (!slot) break;
    require(std::memcmp(a.payload + slot->offset, b.payload + slot->offset, slot->bytes) == 0, "one payload");
  }
}

bool rounds(const Descriptor& d) {
  const bool floating = d.dtype >= DType::kFloat16 && d.dtype <= DType::kComplex128;
  return is_reduction(d.kind) && floating && d.reduce_op != ReduceOp::kMin && d.reduce_op != ReduceOp::kMax;
}

void check_well_formed(Reader& in) {
  Records r = read_records(in, true);
  for (int m = 0; m < kMembers; ++m) {  // a member that offers less, or something else somewhere
    Record& record = *r[static_cast<size_t>(m)];
    if (in.byte() % 4 == 1) record.offered = record.agreed = std::min<uint32_t>(in.byte(), record.agreed);
    if (in.byte() % 4 == 1) record.descriptors[in.byte() % kMaxDescriptors].equal_hash = in.byte();
  }
  check_equal(*combined(*r[0], *r[1]), *combined(*r[1], *r[0]));
  const auto left = combined(*combined(*r[0], *r[1]), *r[2]);
  // One that has joined looks at the others' operations themselves, which here are of any size.
  for (const auto& record : r)
    require(record->active == 0 || implausible(*record, *left) == nullptr, "an honest result is taken");
  check_equal(*left, *combined(*r[2], *combined(*r[1], *r[0])));
  if (std::none_of(left->descriptors, left->descriptors + left->agreed, rounds))
    check_equal(*left, *combined(*r[0], *combined(*r[1], *r[2])));
}

void check_hostile(Records& r) {
  const Record mine = *r[0];
  const auto result = combined(*combined(*r[0], *r[1]), *r[2]);
  // The member whose own record is honest acts on nothing that it did not offer, even if the result is a peer's word.
  for (const Record* got : {result.get(), r[1].get()}) {
    if (mine.offered > kMaxOffered || implausible(mine, *got) != nullptr) continue;
    const uint32_t most = mine.active > 0 ? mine.offered : kMaxOffered;
    require(got->agreed <= most, "a plausible result is safe to index by");
    uint32_t runs = 0, operations = 0;
    for_runs(*got, got->agreed, [&](uint32_t first, uint32_t count, const Descriptor&) {
      require(first == operations, "runs one behind the other");
      operations += count;
      ++runs;
    });
    require(operations == got->agreed && runs <= kMaxDescriptors, "runs that hold what is agreed on");
    require(got->names.fresh_count <= kNewNames && got->names.submitted.within(mine.names.submitted),
            "names that this rank has offered");
    for (uint32_t i = 0; i < got->agreed; ++i) descriptor_at(*got, i);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader in(data, size);
  switch (in.byte() % kModes) {
    case kHostile: {
      Records records = read_records(in, false);
      for (auto& record : records) {
        for (int n = in.byte() % 32; n > 0; --n) {
          const size_t at = in.word() % sizeof(Record);
          reinterpret_cast<uint8_t*>(record.get())[at] = in.byte();
        }
      }
      check_hostile(records);
      break;
    }
    case kRaw: {
      Records records;
      for (int m = 0; m < kMembers; ++m) {
        auto& record = *records.emplace_back(std::make_unique<Record>());
        for (size_t i = 0; i < sizeof(Record) && !in.done(); ++i) reinterpret_cast<uint8_t*>(&record)[i] = in.byte();
      }
      check_hostile(records);
      break;
    }
    case kWellFormed: check_well_formed(in); break;
    case kTable: {
      std::vector<TableEntry> table(in.byte() % 8);
      for (TableEntry& entry : table) {
        const std::string text = in.field('\n');
        std::memset(entry.text, 0, sizeof(entry.text));
        text.copy(entry.text, sizeof(entry.text));  // a long one fills it: there is no end
        require(text_in(entry.text, sizeof(entry.text)).size() <= sizeof(entry.text), "bounded text");
      }
      if (const auto all = piece_sizes(table)) {
        for (const auto& sizes : {all->sizes, all->elements}) {
          int64_t sum = 0;
          require(sizes.size() == table.size(), "a size for each member");
          for (const int64_t one : sizes) {
            require(one >= 0 && !__builtin_add_overflow(sum, one, &sum), "sizes that add up");
          }
        }
      }
    }
  }
  return 0;
}

std::vector<std::string> fuzz::seeds() {
  std::vector<std::string> list;
  const auto descriptor = [](int kind, int dtype, int op, int count) {
    return std::string{static_cast<char>(kind),
                       static_cast<char>(dtype),
                       static_cast<char>(op),
                       0,
                       static_cast<char>(count),
                       static_cast<char>(count >> 8),
                       0};
  };
  std::string reductions, movements;
  for (int dtype = 0; dtype <= static_cast<int>(DType::kOther32); ++dtype) {
    reductions += descriptor(0, dtype, 1 + dtype % 9, 3);
    movements += descriptor(1 + dtype % 10, dtype, 0, 1);
  }
  for (const char mode : {kHostile, kWellFormed}) {
    list.push_back(std::string{mode, 4, 18} + reductions + std::string(600, '\x7f'));
    list.push_back(std::string{mode, 4, 18} + movements + std::string(3 * 1024 + 20, '\xff'));
    list.push_back(std::string{mode, 0, 48} + std::string(48 * 7, 0) + "\x01\x02\x03");
    // Two NaNs that differ in their bits: their sum depended on the order.
    for (const int op : {1, 3, 4, 5}) {
      const auto nan = static_cast<int>(DType::kFloat32);
      std::string text = std::string{mode, 1, 1} + descriptor(0, nan, op, 1);
      for (const char low : {1, 2, 3}) text += std::string{0, low, 0, '\xc0', '\x7f'} + std::string(1022, 0);
      list.push_back(text);
    }
  }
  // More descriptors than a record has, in both operands; a dtype that has no size.
  std::string beyond = std::string{kHostile, 4, 2} + descriptor(0, 0, 1, 4) + descriptor(0, 0, 1, 4);
  beyond += std::string(3 * 1027, 0);
  for (int m = 0; m < kMembers; ++m) beyond += std::string{1, static_cast<char>(offsetof(Record, agreed) + 1), 0, 1};
  list.push_back(beyond);
  list.push_back(std::string{kHostile, 4, 1} + descriptor(0, 200, 1, 4));
  list.push_back(std::string{kRaw} + std::string(3 * sizeof(Record), '\xff'));
  for (const char* sizes : {"\3"
                            "12\n0\n7",
                            "\2"
                            "-1\n5",
                            "\2"
                            "x\n",
                            "\2"
                            "9223372036854775807\n1"})
    list.push_back(std::string{kTable} + sizes);
  list.push_back(std::string{kTable, 1} + std::string(300, '1'));
  return list;
}
