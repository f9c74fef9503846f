// Every value of Apple's enumerations that the Apple layer uses, written once; tests/oracle
// compares them with Apple's own metadata.
#pragma once

#include "plugin/device/apple/objc.h"

// X(name, Apple's name, value)
#define JFM_METAL_CONSTANTS(X)                                       \
  X(kUtf8, NSUTF8StringEncoding, 4)                                  \
  X(kFamilyApple7, MTLGPUFamilyApple7, 1007)                         \
  X(kFamilyApple8, MTLGPUFamilyApple8, 1008)                         \
  X(kFamilyApple9, MTLGPUFamilyApple9, 1009)                         \
  X(kFamilyApple10, MTLGPUFamilyApple10, 1010)                       \
  X(kSharedStorage, MTLResourceStorageModeShared, 0)                 \
  X(kPrivateStorage, MTLResourceStorageModePrivate, 0x20)            \
  X(kLanguage3_1, MTLLanguageVersion3_1, 0x30001)                    \
  X(kInt, MTLDataTypeInt, 29)                                        \
  X(kBool, MTLDataTypeBool, 53)                                      \
  X(kNoOption, MTLPipelineOptionNone, 0)                             \
  X(kFailOnArchiveMiss, MTLPipelineOptionFailOnBinaryArchiveMiss, 4) \
  X(kCompleted, MTLCommandBufferStatusCompleted, 4)                  \
  X(kErrorTimeout, MTLCommandBufferErrorTimeout, 2)                  \
  X(kErrorAccessRevoked, MTLCommandBufferErrorAccessRevoked, 4)      \
  X(kErrorOutOfMemory, MTLCommandBufferErrorOutOfMemory, 8)

namespace jfm::apple::constants {
#define JFM_DEFINE(name, apple_name, value) constexpr NSUInteger name = value;
JFM_METAL_CONSTANTS(JFM_DEFINE)
#undef JFM_DEFINE
}  // namespace jfm::apple::constants
