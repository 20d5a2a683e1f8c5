// The vocabulary that every layer shares: operations, element types, reductions. No torch, no MPI.
#pragma once

#include <cstddef>
#include <cstdint>

namespace multicomm {

enum class OpKind : uint8_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kGatherVariable,  // an all_gather whose sizes only their owners know until all members have submitted
  kBarrier,
  kJoin,  // this rank has no more to submit: it takes part in what the others do until all have joined
  kSend,
  kRecv,
};

enum class DType : uint8_t {
  kBool,
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kUint64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
  kOther8,  // moved, never reduced: fp8, quantised types; the digits are the element's bits
  kOther16,
  kOther32,
};

// kPremulSum: every rank brings its input already scaled by its own factor; from there on it is a sum.
enum class ReduceOp : uint8_t { kNone, kSum, kAvg, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor, kPremulSum };

enum class DeviceKind : uint8_t { kCpu, kCuda };

const char* name_of(OpKind kind);
const char* name_of(DType dtype);
const char* name_of(ReduceOp op);

// Bytes of one element in the caller's tensor.
size_t size_of(DType dtype);

// The type in which a reduction of `dtype` is carried: half precision is added in fp32, so that neither
// the order nor the number of ranks costs accuracy beyond one final rounding.
DType accumulation_type(DType dtype);

// Point-to-point operations are matched by (peer, tag), never by rounds.
constexpr bool is_point_to_point(OpKind kind) { return kind == OpKind::kSend || kind == OpKind::kRecv; }

// Operations that combine elements arithmetically; the others move bytes.
constexpr bool is_reduction(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

constexpr bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
}

}  // namespace multicomm
