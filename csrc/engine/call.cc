#include "engine/call.h"

#include <algorithm>

namespace ringdl {

int64_t rows_of(const Call& call) { return call.shape.empty() ? 1 : call.shape[0]; }

size_t row_bytes(const Call& call) {
  size_t bytes = item_bytes(call.dtype);
  for (size_t i = 1; i < call.shape.size(); ++i) bytes *= static_cast<size_t>(call.shape[i]);
  return has_uneven_rows(call.kind) ? std::max<size_t>(bytes, 1) : bytes;
}

size_t bytes_of(const Call& call) { return row_bytes(call) * static_cast<size_t>(rows_of(call)); }

uint64_t digest_of(const Call& call) {
  const auto mix = [](uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 32);
  };
  uint64_t digest = mix(static_cast<uint64_t>(call.dtype), static_cast<uint64_t>(call.reduction));
  digest = mix(digest, call.shape.size());
  for (const int64_t extent : call.shape) digest = mix(digest, static_cast<uint64_t>(extent));
  return digest;
}

Description describe(const Call& call) {
  Description description;
  description.kind = call.kind;
  description.dtype = call.dtype;
  description.wire = call.dtype;
  description.memory = call.memory.kind;
  description.reduction = call.reduction;
  description.root = call.root;
  description.group = call.group ? call.group->id : 0;
  description.dimensions = static_cast<int32_t>(call.shape.size());
  description.count = 1;
  const size_t first = has_uneven_rows(call.kind) ? 1 : 0;
  std::string dimensions;
  for (size_t i = first; i < call.shape.size(); ++i) {
    description.count *= call.shape[i];
    dimensions += std::to_string(call.shape[i]) + ",";
    if (i - first < kMaxDimensions) description.shape[i - first] = call.shape[i];
  }
  if (first == 1) --description.dimensions;
  description.shape_hash = hash_of(dimensions);
  description.operation = call.operation.digest;
  if (call.compression) description.wire = *call.compression;
  set_operation_name(description, call.operation.name);
  set_name(description, call.name);
  return description;
}

}  // namespace ringdl
