// Compiled, never run, against a jaxlib's headers: checks our declarations against the real ones.
#include <xla/ffi/api/c_api.h>

#include <cstddef>

#include "binding/xla_ffi.h"

namespace xla_ = ringdl::xla;

#define SAME_SIZE(theirs, ours) static_assert(sizeof(theirs) == sizeof(xla_::ours))
#define SAME_PLACE(theirs, field, ours, own) \
  static_assert(offsetof(theirs, field) == offsetof(xla_::ours, own))

SAME_SIZE(XLA_FFI_Extension_Base, Extension);
SAME_PLACE(XLA_FFI_Extension_Base, type, Extension, type);
SAME_PLACE(XLA_FFI_Extension_Base, next, Extension, next);
SAME_SIZE(XLA_FFI_Api_Version, ApiVersion);
SAME_PLACE(XLA_FFI_Api_Version, major_version, ApiVersion, major_version);
SAME_PLACE(XLA_FFI_Api_Version, minor_version, ApiVersion, minor_version);
SAME_PLACE(XLA_FFI_Metadata, api_version, Metadata, api_version);
SAME_PLACE(XLA_FFI_Metadata, traits, Metadata, traits);
SAME_SIZE(XLA_FFI_Metadata_Extension, MetadataExtension);
SAME_PLACE(XLA_FFI_Metadata_Extension, metadata, MetadataExtension, metadata);
SAME_SIZE(XLA_FFI_Error_Create_Args, ErrorArguments);
SAME_PLACE(XLA_FFI_Error_Create_Args, message, ErrorArguments, message);
SAME_PLACE(XLA_FFI_Error_Create_Args, errc, ErrorArguments, code);
SAME_PLACE(XLA_FFI_Api, api_version, ApiTag, version);
SAME_PLACE(XLA_FFI_Api, XLA_FFI_Error_Create, ApiTag, create_error);
SAME_SIZE(XLA_FFI_Buffer, Buffer);
SAME_PLACE(XLA_FFI_Buffer, dtype, Buffer, dtype);
SAME_PLACE(XLA_FFI_Buffer, data, Buffer, data);
SAME_PLACE(XLA_FFI_Buffer, rank, Buffer, rank);
SAME_PLACE(XLA_FFI_Buffer, dims, Buffer, dims);
SAME_SIZE(XLA_FFI_ByteSpan, Span);
SAME_SIZE(XLA_FFI_Scalar, Scalar);
SAME_PLACE(XLA_FFI_Scalar, value, Scalar, value);
SAME_SIZE(XLA_FFI_Args, Buffers);
SAME_PLACE(XLA_FFI_Args, args, Buffers, values);
SAME_SIZE(XLA_FFI_Rets, Buffers);
SAME_PLACE(XLA_FFI_Rets, rets, Buffers, values);
SAME_SIZE(XLA_FFI_Attrs, Attributes);
SAME_PLACE(XLA_FFI_Attrs, names, Attributes, names);
SAME_PLACE(XLA_FFI_Attrs, attrs, Attributes, values);
SAME_SIZE(XLA_FFI_CallFrame, CallFrame);
SAME_PLACE(XLA_FFI_CallFrame, api, CallFrame, api);
SAME_PLACE(XLA_FFI_CallFrame, stage, CallFrame, stage);
SAME_PLACE(XLA_FFI_CallFrame, args, CallFrame, arguments);
SAME_PLACE(XLA_FFI_CallFrame, rets, CallFrame, results);
SAME_PLACE(XLA_FFI_CallFrame, attrs, CallFrame, attributes);
SAME_PLACE(XLA_FFI_CallFrame, future, CallFrame, future);

#define SAME(theirs, ours) static_assert(static_cast<int>(theirs) == static_cast<int>(ours))
SAME(XLA_FFI_Extension_Metadata, xla_::kMetadataExtension);
SAME(XLA_FFI_API_MAJOR, 0);
SAME(XLA_FFI_ExecutionStage_EXECUTE, xla_::kExecute);
SAME(XLA_FFI_AttrType_SCALAR, xla_::kScalarAttribute);
SAME(XLA_FFI_Error_Code_INVALID_ARGUMENT, xla_::ErrorCode::kInvalidArgument);
SAME(XLA_FFI_Error_Code_ABORTED, xla_::ErrorCode::kAborted);
SAME(XLA_FFI_Error_Code_UNIMPLEMENTED, xla_::ErrorCode::kUnimplemented);
SAME(XLA_FFI_DataType_PRED, xla_::Type::kBool);
SAME(XLA_FFI_DataType_S8, xla_::Type::kInt8);
SAME(XLA_FFI_DataType_S16, xla_::Type::kInt16);
SAME(XLA_FFI_DataType_S32, xla_::Type::kInt32);
SAME(XLA_FFI_DataType_S64, xla_::Type::kInt64);
SAME(XLA_FFI_DataType_U8, xla_::Type::kUInt8);
SAME(XLA_FFI_DataType_F16, xla_::Type::kFloat16);
SAME(XLA_FFI_DataType_F32, xla_::Type::kFloat32);
SAME(XLA_FFI_DataType_F64, xla_::Type::kFloat64);
SAME(XLA_FFI_DataType_BF16, xla_::Type::kBFloat16);
SAME(XLA_FFI_DataType_TOKEN, xla_::Type::kToken);
