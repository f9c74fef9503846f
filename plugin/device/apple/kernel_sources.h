// The Metal sources that the library carries: generated into it by the build, so that the
// kernels, the planner's table and the parameter structs are always of one version.
#pragma once

#include <string>

namespace jfm::apple {

struct MslSource {
  const char* name;
  const char* text;  // no #include of a project file is left in it
};

struct MslKernel {
  const char* host_name;
  int source;                 // index of its MslSource
  const char* instantiation;  // the line that makes the source's template this kernel
};

// Null where there is none of this name.
const MslKernel* FindMslKernel(const std::string& host_name);

// What the Metal compiler gets: the source with this one kernel instantiated.
std::string MslText(const MslKernel& kernel);

// Changes with any of the sources; hexadecimal.
std::string MslDigest();

}  // namespace jfm::apple
