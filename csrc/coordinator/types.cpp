#include "coordinator/types.h"

namespace multicomm {

const char* name_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce: return "all_reduce";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kReduce: return "reduce";
    case OpKind::kAllGather: return "all_gather";
    case OpKind::kReduceScatter: return "reduce_scatter";
    case OpKind::kAllToAll: return "all_to_all";
    case OpKind::kGather: return "gather";
    case OpKind::kScatter: return "scatter";
    case OpKind::kGatherVariable: return "all_gather of variable sizes";
    case OpKind::kBarrier: return "barrier";
    case OpKind::kJoin: return "join";
    case OpKind::kSend: return "send";
    case OpKind::kRecv: return "recv";
  }
  return "unknown operation";
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kBool: return "bool";
    case DType::kUint8: return "uint8";
    case DType::kInt8: return "int8";
    case DType::kUint16: return "uint16";
    case DType::kInt16: return "int16";
    case DType::kUint32: return "uint32";
    case DType::kInt32: return "int32";
    case DType::kUint64: return "uint64";
    case DType::kInt64: return "int64";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
    case DType::kComplex64: return "complex64";
    case DType::kComplex128: return "complex128";
    case DType::kOther8: return "8-bit opaque";
    case DType::kOther16: return "16-bit opaque";
    case DType::kOther32: return "32-bit opaque";
  }
  return "unknown dtype";
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kNone: return "NONE";
    case ReduceOp::kSum: return "SUM";
    case ReduceOp::kAvg: return "AVG";
    case ReduceOp::kProduct: return "PRODUCT";
    case ReduceOp::kMin: return "MIN";
    case ReduceOp::kMax: return "MAX";
    case ReduceOp::kBitAnd: return "BAND";
    case ReduceOp::kBitOr: return "BOR";
    case ReduceOp::kBitXor: return "BXOR";
    case ReduceOp::kPremulSum: return "PREMUL_SUM";
  }
  return "unknown reduce op";
}

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUint8:
    case DType::kInt8:
    case DType::kOther8: return 1;
    case DType::kUint16:
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kOther16: return 2;
    case DType::kUint32:
    case DType::kInt32:
    case DType::kFloat32:
    case DType::kOther32: return 4;
    case DType::kUint64:
    case DType::kInt64:
    case DType::kFloat64:
    case DType::kComplex64: return 8;
    case DType::kComplex128: return 16;
  }
  return 0;
}

DType accumulation_type(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
}

}  // namespace multicomm
