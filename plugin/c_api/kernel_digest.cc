// A file of its own: it is compiled again whenever a kernel changes.
#include "plugin/c_api/c_api.h"
#include "plugin/c_boundary.h"

extern "C" JFM_EXPORT const char* jfm_kernel_digest(void) {
  return
#include "kernel_digest.inc"
      ;
}
