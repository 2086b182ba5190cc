#include "engine/wire.h"

#include <algorithm>
#include <cstdio>

#include "collective/planner/algorithms.h"

namespace ringdl {
namespace {

std::string ordinal(uint64_t number) {
  const bool teen = number / 10 % 10 == 1;
  const char* ending = teen               ? "th"
                       : number % 10 == 1 ? "st"
                       : number % 10 == 2 ? "nd"
                       : number % 10 == 3 ? "rd"
                                          : "th";
  return std::to_string(number) + ending;
}

}  // namespace

std::string_view cut_to_fit(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

void set_name(Description& description, std::string_view name) {
  const std::string_view fitting = cut_to_fit(name, kMaxNameBytes - 1);
  fitting.copy(description.name, fitting.size());
}

void set_operation_name(Description& description, std::string_view name) {
  const std::string_view fitting = cut_to_fit(name, kMaxOperationBytes - 1);
  fitting.copy(description.operation_name, fitting.size());
}

std::string shape_text(const Description& description) {
  std::string text = has_uneven_rows(description.kind) ? "(*, " : "(";
  for (int i = 0; i < std::min<int>(description.dimensions, kMaxDimensions); ++i) {
    text += std::to_string(description.shape[i]) + ", ";
  }
  if (description.dimensions > kMaxDimensions) text += "..., ";
  if (description.dimensions > 0 || has_uneven_rows(description.kind)) {
    text.resize(text.size() - (description.dimensions == 1 ? 1 : 2));
  }
  return text + ")";
}

// Functions of one name differ in their digests.
std::string reduction_text(const Description& description) {
  if (description.operation == 0) return std::string(name_of(description.reduction));
  char digest[17];
  std::snprintf(digest, sizeof(digest), "%08x",
                static_cast<unsigned>(description.operation & 0xffffffffu));
  return std::string("'") + description.operation_name + "' (code " + digest + ")";
}

std::string label_of(const Key& key, const Description& description, const Group& group) {
  if (key.space == KeySpace::kBucket) return description.name + group.text;
  std::string kind(name_of(description.kind));
  if (key.space == KeySpace::kUnnamed) {
    return "the " + ordinal(key.instance + 1) + " unnamed " + kind + group.text;
  }
  return kind + " '" + description.name + "'" + group.text;
}

std::string difference(const Description& theirs, int their_rank, const Description& ours,
                       int our_rank) {
  const auto text = [&](const std::string& field, const auto& their_value, const auto& our_value) {
    return field + " " + std::string(their_value) + " on rank " + std::to_string(their_rank) +
           " and " + std::string(our_value) + " on rank " + std::to_string(our_rank);
  };
  if (theirs.kind != ours.kind) return text("kind", name_of(theirs.kind), name_of(ours.kind));
  if (theirs.dtype != ours.dtype) return text("dtype", name_of(theirs.dtype), name_of(ours.dtype));
  if (theirs.reduction != ours.reduction || theirs.operation != ours.operation) {
    return text("reduction", reduction_text(theirs), reduction_text(ours));
  }
  if (theirs.memory != ours.memory) {
    return text("memory:", name_of(theirs.memory), name_of(ours.memory));
  }
  if (theirs.algorithm != ours.algorithm) {
    return text("algorithm", name_of(theirs.algorithm), name_of(ours.algorithm));
  }
  if (theirs.wire != ours.wire) {
    return text("compression", name_of(theirs.wire), name_of(ours.wire));
  }
  if (theirs.dimensions != ours.dimensions || theirs.shape_hash != ours.shape_hash ||
      theirs.count != ours.count) {
    return text("shape", shape_text(theirs), shape_text(ours));
  }
  if (theirs.root != ours.root) {
    const bool is_digest = ours.kind == Kind::kAllreduce;
    return text(is_digest ? "shapes of the arrays that are reduced together, digest" : "root",
                std::to_string(theirs.root), std::to_string(ours.root));
  }
  return "";
}

}  // namespace ringdl
