// Which host plugins are known, and how the handlers' side of each one's memory works.
#pragma once

#include <string>

#include "plugin/pjrt/host.h"
#include "plugin/pjrt/hosts/buffer_access.h"
#include "plugin/status.h"

namespace jfm::pjrt {

// What a client of the host says that it is.
struct HostIdentity {
  std::string platform_name;
  std::string platform_version;
};
Result<HostIdentity> IdentityOf(const Host& host, PJRT_Client* client);

// Chosen by identity, or by the setting ("address", "copy") when that is not "auto". An
// unknown host is refused: what its pointers mean cannot be guessed.
Result<HostAccess> ChooseAccess(const Host& host, const HostIdentity& identity,
                                const std::string& setting);

}  // namespace jfm::pjrt
