// Every class, and every message with its exact C types, that the Apple layer uses: the one
// place where they are written. tests/oracle compares the table with Apple's own metadata.
#pragma once

#include "plugin/device/apple/objc.h"

#define JFM_CLASSES(X)            \
  X(NSArray)                      \
  X(NSProcessInfo)                \
  X(NSString)                     \
  X(NSURL)                        \
  X(MTLBinaryArchiveDescriptor)   \
  X(MTLCompileOptions)            \
  X(MTLComputePipelineDescriptor) \
  X(MTLFunctionConstantValues)

// X(C++ name, class or protocol, selector, result, arguments...). None returns a struct: those
// over 16 bytes go through another function of the runtime on x86-64 (not on arm64).
#define JFM_SELECTORS(X)                                                                           \
  X(alloc, NSObject, "alloc", id)                                                                  \
  X(init, NSObject, "init", id)                                                                    \
  X(retain, NSObject, "retain", id)                                                                \
  X(release, NSObject, "release", void)                                                            \
  X(respondsToSelector, NSObject, "respondsToSelector:", BOOL, SEL)                                \
  X(arrayWithObject, NSArray, "arrayWithObject:", id, id)                                          \
  X(stringWithCString, NSString, "stringWithCString:encoding:", id, const char*, NSUInteger)       \
  X(UTF8String, NSString, "UTF8String", const char*)                                               \
  X(fileURLWithPath, NSURL, "fileURLWithPath:", id, id)                                            \
  X(code, NSError, "code", NSInteger)                                                              \
  X(localizedDescription, NSError, "localizedDescription", id)                                     \
  X(integerValue, NSNumber, "integerValue", NSInteger)                                             \
  X(processInfo, NSProcessInfo, "processInfo", id)                                                 \
  X(operatingSystemVersionString, NSProcessInfo, "operatingSystemVersionString", id)               \
  X(name, MTLDevice, "name", id)                                                                   \
  X(registryID, MTLDevice, "registryID", uint64)                                                   \
  X(supportsFamily, MTLDevice, "supportsFamily:", BOOL, NSInteger)                                 \
  X(hasUnifiedMemory, MTLDevice, "hasUnifiedMemory", BOOL)                                         \
  X(maxBufferLength, MTLDevice, "maxBufferLength", NSUInteger)                                     \
  X(maxThreadgroupMemoryLength, MTLDevice, "maxThreadgroupMemoryLength", NSUInteger)               \
  X(recommendedMaxWorkingSetSize, MTLDevice, "recommendedMaxWorkingSetSize", uint64)               \
  X(newCommandQueue, MTLDevice, "newCommandQueue", id)                                             \
  X(newBufferWithLength, MTLDevice, "newBufferWithLength:options:", id, NSUInteger, NSUInteger)    \
  X(newBufferWithBytesNoCopy, MTLDevice,                                                           \
    "newBufferWithBytesNoCopy:length:options:deallocator:", id, void*, NSUInteger, NSUInteger,     \
    Block*)                                                                                        \
  X(newLibraryWithSource, MTLDevice, "newLibraryWithSource:options:error:", id, id, id, id*)       \
  X(newComputePipelineState, MTLDevice,                                                            \
    "newComputePipelineStateWithDescriptor:options:reflection:error:", id, id, NSUInteger, id*,    \
    id*)                                                                                           \
  X(newBinaryArchive, MTLDevice, "newBinaryArchiveWithDescriptor:error:", id, id, id*)             \
  X(setFastMathEnabled, MTLCompileOptions, "setFastMathEnabled:", void, BOOL)                      \
  X(setLanguageVersion, MTLCompileOptions, "setLanguageVersion:", void, NSUInteger)                \
  X(setConstantValue, MTLFunctionConstantValues, "setConstantValue:type:atIndex:", void,           \
    const void*, NSUInteger, NSUInteger)                                                           \
  X(newFunction, MTLLibrary, "newFunctionWithName:constantValues:error:", id, id, id, id*)         \
  X(setComputeFunction, MTLComputePipelineDescriptor, "setComputeFunction:", void, id)             \
  X(setBinaryArchives, MTLComputePipelineDescriptor, "setBinaryArchives:", void, id)               \
  X(setUrl, MTLBinaryArchiveDescriptor, "setUrl:", void, id)                                       \
  X(addComputePipelineFunctions, MTLBinaryArchive,                                                 \
    "addComputePipelineFunctionsWithDescriptor:error:", BOOL, id, id*)                             \
  X(serializeToURL, MTLBinaryArchive, "serializeToURL:error:", BOOL, id, id*)                      \
  X(maxTotalThreadsPerThreadgroup, MTLComputePipelineState, "maxTotalThreadsPerThreadgroup",       \
    NSUInteger)                                                                                    \
  X(threadExecutionWidth, MTLComputePipelineState, "threadExecutionWidth", NSUInteger)             \
  X(staticThreadgroupMemoryLength, MTLComputePipelineState, "staticThreadgroupMemoryLength",       \
    NSUInteger)                                                                                    \
  X(contents, MTLBuffer, "contents", void*)                                                        \
  X(length, MTLBuffer, "length", NSUInteger)                                                       \
  X(device, MTLResource, "device", id)                                                             \
  X(commandBuffer, MTLCommandQueue, "commandBuffer", id)                                           \
  X(computeCommandEncoder, MTLCommandBuffer, "computeCommandEncoder", id)                          \
  X(addCompletedHandler, MTLCommandBuffer, "addCompletedHandler:", void, Block*)                   \
  X(commit, MTLCommandBuffer, "commit", void)                                                      \
  X(status, MTLCommandBuffer, "status", NSUInteger)                                                \
  X(error, MTLCommandBuffer, "error", id)                                                          \
  X(setComputePipelineState, MTLComputeCommandEncoder, "setComputePipelineState:", void, id)       \
  X(setBuffer, MTLComputeCommandEncoder, "setBuffer:offset:atIndex:", void, id, NSUInteger,        \
    NSUInteger)                                                                                    \
  X(setBytes, MTLComputeCommandEncoder, "setBytes:length:atIndex:", void, const void*, NSUInteger, \
    NSUInteger)                                                                                    \
  X(dispatchThreadgroups, MTLComputeCommandEncoder,                                                \
    "dispatchThreadgroups:threadsPerThreadgroup:", void, MTLSize, MTLSize)                         \
  X(endEncoding, MTLCommandEncoder, "endEncoding", void)

namespace jfm::apple {

namespace classes {
#define JFM_DECLARE(name) extern Class name;
JFM_CLASSES(JFM_DECLARE)
#undef JFM_DECLARE
}  // namespace classes

namespace send {
#define JFM_SIGNATURE(result, ...) result(__VA_ARGS__)
#define JFM_DECLARE(name, owner, selector, ...) extern Message<JFM_SIGNATURE(__VA_ARGS__)> name;
JFM_SELECTORS(JFM_DECLARE)
#undef JFM_DECLARE
}  // namespace send

}  // namespace jfm::apple
