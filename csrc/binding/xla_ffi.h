#pragma once

#include <cstddef>
#include <cstdint>

/// The part of XLA's foreign function interface (xla/ffi/api/c_api.h) that a handler needs,
/// declared here so that no jaxlib is needed to build. tests/csrc/binding/xla_declarations.cc
/// checks it against a real one.
namespace ringdl::xla {

enum class Type : int {
  kBool = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kUInt8 = 6,
  kFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kBFloat16 = 16,
  kToken = 17,
};

enum class ErrorCode : int { kInvalidArgument = 3, kAborted = 10, kUnimplemented = 12 };

using Error = struct ErrorTag;
using Api = struct ApiTag;

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};
inline constexpr int kMetadataExtension = 1;

struct ApiVersion {
  size_t struct_size;
  Extension* extensions;
  int major_version;
  int minor_version;
};

struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorArguments {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};

/// The first of its functions.
struct ApiTag {
  size_t struct_size;
  Extension* extensions;
  ApiVersion version;
  const void* internal_api;
  Error* (*create_error)(ErrorArguments*);
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  Type dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Span {
  const char* begin;
  size_t size;
};
struct Scalar {
  Type dtype;
  void* value;
};
inline constexpr int kScalarAttribute = 3;

/// Arguments and results: each a Buffer.
struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  void** values;
};
struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  Span** names;
  void** values;
};

inline constexpr int kExecute = 3;

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  int stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
  void* future;
};

}  // namespace ringdl::xla
