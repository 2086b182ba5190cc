#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace ringdl {

/// How parameters are changed by a gradient.
///
/// Threads: pure functions. Dtypes: float32 and float64, computed in themselves.
struct Update {
  enum class Rule : uint8_t {
    kSgd,      // p -= rate * g
    kAdagrad,  // Duchi, Hazan and Singer 2011: by the root of the sum of squares
    kAdam,     // Kingma and Ba 2015: by means of gradients and of their squares
  };
  Rule rule = Rule::kSgd;
  double rate = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
};

/// How many arrays of the parameters' size a rule keeps beside them, all zeros in the beginning.
constexpr int states_of(Update::Rule rule) {
  return rule == Update::Rule::kSgd ? 0 : rule == Update::Rule::kAdagrad ? 1 : 2;
}
constexpr int kMostStates = 2;

bool is_updatable(DType dtype);

/// Changes parameters, and the rule's arrays.
/// @param number  which update of these parameters it is, from 1
/// @param states  as many as states_of() says
void update(DType dtype, const Update& how, uint64_t number, std::byte* parameters,
            const std::array<std::byte*, kMostStates>& states, const std::byte* gradient,
            size_t count);

/// Moves two arrays by the same share of their difference, towards one another: elastic averaging
/// (Zhang, Choromanska and LeCun 2015).
void pull_together(DType dtype, double share, std::byte* one, std::byte* other, size_t count);

}  // namespace ringdl
