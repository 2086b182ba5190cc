#include "engine/wire.h"

#include <algorithm>

namespace ringdl {
namespace {

std::string shape_text(const Description& description) {
  std::string text = description.kind == Kind::kAllgather ? "(*, " : "(";
  for (int i = 0; i < std::min<int>(description.dimensions, kMaxDimensions); ++i) {
    text += std::to_string(description.shape[i]) + ", ";
  }
  if (description.dimensions > kMaxDimensions) text += "..., ";
  if (description.dimensions > 0 || description.kind == Kind::kAllgather) {
    text.resize(text.size() - (description.dimensions == 1 ? 1 : 2));
  }
  return text + ")";
}

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

std::string label_of(const Key& key, const Description& description) {
  const std::string kind(name_of(description.kind));
  if (key.space == KeySpace::kBucket) return std::string(description.name);
  if (key.space == KeySpace::kUnnamed) {
    return "the " + ordinal(key.instance + 1) + " unnamed " + kind;
  }
  return kind + " '" + description.name + "'";
}

std::string difference(const Description& theirs, int their_rank, const Description& ours,
                       int our_rank) {
  const auto text = [&](const std::string& field, const auto& their_value, const auto& our_value) {
    return field + " " + std::string(their_value) + " on rank " + std::to_string(their_rank) +
           " and " + std::string(our_value) + " on rank " + std::to_string(our_rank);
  };
  if (theirs.kind != ours.kind) return text("kind", name_of(theirs.kind), name_of(ours.kind));
  if (theirs.dtype != ours.dtype) return text("dtype", name_of(theirs.dtype), name_of(ours.dtype));
  if (theirs.reduction != ours.reduction) {
    return text("reduction", name_of(theirs.reduction), name_of(ours.reduction));
  }
  if (theirs.root != ours.root) {
    return text("root", std::to_string(theirs.root), std::to_string(ours.root));
  }
  if (theirs.dimensions != ours.dimensions || theirs.shape_hash != ours.shape_hash ||
      theirs.count != ours.count) {
    return text("shape", shape_text(theirs), shape_text(ours));
  }
  return "";
}

}  // namespace ringdl
