// The FFI extension node (PJRT extension type 5) of our API: others register handlers,
// types and user data through it. Handlers of other platforms go on to the host's node.
#pragma once

#include <memory>
#include <string>

#include "plugin/pjrt/custom_call/types.h"
#include "plugin/pjrt/pjrt_api.h"
#include "plugin/status.h"

namespace jfm::pjrt {

using CreateErrorFunction = PJRT_Error* (*)(const Status& status);

// The node, to be linked in front of `next`; it lives as long as the process. To be
// called once. `platform_name` is ours: its handlers go to our registry. `host_node` is
// the host's own node of this type, or null.
PJRT_Extension* MakeFfiExtension(const std::string& platform_name, const PJRT_Extension* host_node,
                                 PJRT_Extension* next, CreateErrorFunction create_error);

// What was attached to an execution's context until now; empty when nothing was. What the
// values point to lives as long as `owner`, even if the context is destroyed meanwhile.
struct AttachedData {
  UserData values;
  std::shared_ptr<const void> owner;
};
AttachedData FindUserData(const PJRT_ExecuteContext* context);
// To be called when the context is destroyed.
void ForgetUserData(const PJRT_ExecuteContext* context);

}  // namespace jfm::pjrt
