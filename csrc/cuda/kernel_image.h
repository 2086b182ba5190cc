#pragma once

#include <string_view>
#include <utility>
#include <vector>

namespace ringdl::cuda {

/// The compiled kernels, as cuModuleLoadData() takes them; null in a build without nvcc.
const void* kernel_image();

/// What they are compiled from, to be compiled elsewhere (ringdl/_nvrtc.py): the name under which
/// the files include one another, and the text; the first one includes the others.
std::vector<std::pair<std::string_view, std::string_view>> kernel_sources();

}  // namespace ringdl::cuda
