#include "reduce/update.h"

#include <cmath>

namespace ringdl {
namespace {

template <class T>
void sgd(T rate, T* __restrict p, const T* __restrict g, size_t count) {
  for (size_t i = 0; i < count; ++i) p[i] -= rate * g[i];
}

template <class T>
void adagrad(T rate, T epsilon, T* __restrict p, T* __restrict sum, const T* __restrict g,
             size_t count) {
  for (size_t i = 0; i < count; ++i) {
    sum[i] += g[i] * g[i];
    p[i] -= rate * (g[i] / (std::sqrt(sum[i]) + epsilon));
  }
}

template <class T>
void adam(const Update& how, uint64_t number, T* __restrict p, T* __restrict first,
          T* __restrict second, const T* __restrict g, size_t count) {
  const auto power = static_cast<double>(number);
  const auto rate = static_cast<T>(how.rate / (1 - std::pow(how.beta1, power)));
  const auto correction = static_cast<T>(1 / std::sqrt(1 - std::pow(how.beta2, power)));
  const auto beta1 = static_cast<T>(how.beta1);
  const auto beta2 = static_cast<T>(how.beta2);
  const auto rest1 = static_cast<T>(1 - how.beta1);
  const auto rest2 = static_cast<T>(1 - how.beta2);
  const auto epsilon = static_cast<T>(how.epsilon);
  for (size_t i = 0; i < count; ++i) {
    first[i] = beta1 * first[i] + rest1 * g[i];
    second[i] = beta2 * second[i] + rest2 * (g[i] * g[i]);
    p[i] -= rate * (first[i] / (std::sqrt(second[i]) * correction + epsilon));
  }
}

template <class T>
void update_as(const Update& how, uint64_t number, std::byte* parameters,
               const std::array<std::byte*, kMostStates>& states, const std::byte* gradient,
               size_t count) {
  auto* const p = reinterpret_cast<T*>(parameters);
  const auto* const g = reinterpret_cast<const T*>(gradient);
  auto* const first = reinterpret_cast<T*>(states[0]);
  switch (how.rule) {
    case Update::Rule::kSgd:
      return sgd(static_cast<T>(how.rate), p, g, count);
    case Update::Rule::kAdagrad:
      return adagrad(static_cast<T>(how.rate), static_cast<T>(how.epsilon), p, first, g, count);
    case Update::Rule::kAdam:
      return adam(how, number, p, first, reinterpret_cast<T*>(states[1]), g, count);
  }
}

template <class T>
void pull_together_as(T share, std::byte* one, std::byte* other, size_t count) {
  T* __restrict x = reinterpret_cast<T*>(one);
  T* __restrict y = reinterpret_cast<T*>(other);
  for (size_t i = 0; i < count; ++i) {
    const T difference = share * (x[i] - y[i]);
    x[i] -= difference;
    y[i] += difference;
  }
}

}  // namespace

bool is_updatable(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kFloat64; }

void update(DType dtype, const Update& how, uint64_t number, std::byte* parameters,
            const std::array<std::byte*, kMostStates>& states, const std::byte* gradient,
            size_t count) {
  if (dtype == DType::kFloat32) {
    update_as<float>(how, number, parameters, states, gradient, count);
  } else {
    update_as<double>(how, number, parameters, states, gradient, count);
  }
}

void pull_together(DType dtype, double share, std::byte* one, std::byte* other, size_t count) {
  if (dtype == DType::kFloat32) {
    pull_together_as(static_cast<float>(share), one, other, count);
  } else {
    pull_together_as(share, one, other, count);
  }
}

}  // namespace ringdl
