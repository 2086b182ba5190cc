#pragma once

#include <span>

namespace ringdl {

/// A function that a shared library imports, and what it is to call instead.
struct Import {
  const char* symbol;
  void* replacement;
};

/// Has a loaded library call other functions than those that it imports: its own table of them is
/// changed, so no other library notices. As memory hooks of UCX and libfabric do ("relocation").
/// Calls that are under way, or go by pointers that were taken before, are not changed.
/// @param inside  any address in the library's code
/// @return  whether it imports all of these; else none is replaced
bool replace_imports(const void* inside, std::span<const Import> imports);

}  // namespace ringdl
