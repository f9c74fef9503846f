// The table of hosts. What each row says is from the hosts' own binaries; none of the Metal
// ones has been run by us (docs/pjrt.md).
#include "plugin/pjrt/hosts/known_hosts.h"

#include <algorithm>
#include <iterator>

namespace jfm::pjrt {
namespace {

enum class Handover { kAddress, kAddressAndCopy, kCopy };

HostAccess AccessBy(Handover handover) {
  switch (handover) {
    case Handover::kAddress:
      return {&AddressAccess(), nullptr, "address", true};
    case Handover::kAddressAndCopy:
      return {&AddressAndCopyAccess(), nullptr, "address+copy", true};
    case Handover::kCopy:
      break;
  }
  return {&CopyAccess(), nullptr, "copy", true};
}

struct KnownHost {
  const char* name;  // on PyPI
  const char* platform_name;
  const char* platform_version;  // what it starts with
  Handover handover;
  bool has_native_buffers;  // id<MTLBuffer> in and out
};

constexpr KnownHost kKnownHosts[] = {
    // XLA's CPU client, whoever built it.
    {"a CPU plugin", "cpu", "", Handover::kAddress, false},
    // 0.1.1: private memory. Its two strings are constants in the binary.
    {"jax-metal 0.1.1", "METAL", "metal_0.5.1", Handover::kCopy, true},
    // 0.0.5: shared memory. The version is put together at run time, so not looked at.
    {"jax-graft", "mtl", "", Handover::kAddress, false},
    // 0.11.9. Other plugins are called "metal" too, and give null pointers.
    {"metaljax", "metal", "metaljax-native", Handover::kAddressAndCopy, false},
    // 0.11.1: its pointers are null.
    {"jax-mps", "mps", "", Handover::kCopy, false},
};

bool StartsWith(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

Status Refuse(const HostIdentity& identity) {
  constexpr char kAdvice[] =
      "so neither is what the pointers to its buffers mean; "
      "JAX_FLASH_METAL_HOST_BUFFERS=copy works with every host.";
  std::string versions;
  for (const KnownHost& row : kKnownHosts) {
    if (row.platform_name != identity.platform_name) continue;
    versions += std::string(versions.empty() ? "" : ", ") + "'" + row.platform_version + "' (" +
                row.name + ")";
  }
  if (versions.empty()) {
    return {Code::kFailedPrecondition, "the host plugin's platform '" + identity.platform_name +
                                           "' (version '" + identity.platform_version +
                                           "') is not known, " + kAdvice};
  }
  return {Code::kFailedPrecondition,
          "the version '" + identity.platform_version + "' of the host plugin's platform '" +
              identity.platform_name + "' is not known, only " + versions + " is, " + kAdvice};
}

}  // namespace

Result<HostIdentity> IdentityOf(const Host& host, PJRT_Client* client) {
  PJRT_Client_PlatformName_Args name = {};
  name.client = client;
  if (Status status = host.Call(name); !status.ok()) return status;
  if (name.platform_name == nullptr || name.platform_name_size == 0) {
    return WrongAnswer(name.kSlot, "gave no name");
  }
  PJRT_Client_PlatformVersion_Args version = {};
  version.client = client;
  if (Status status = host.Call(version); !status.ok()) return status;
  if (version.platform_version == nullptr && version.platform_version_size > 0) {
    return WrongAnswer(version.kSlot, "gave no text");
  }
  HostIdentity identity;
  identity.platform_name.assign(name.platform_name, name.platform_name_size);
  if (version.platform_version != nullptr) {
    identity.platform_version.assign(version.platform_version, version.platform_version_size);
  }
  return identity;
}

Result<HostAccess> ChooseAccess(const Host& host, const HostIdentity& identity,
                                const std::string& setting) {
  const auto* known =
      std::find_if(std::begin(kKnownHosts), std::end(kKnownHosts), [&](const KnownHost& row) {
        return row.platform_name == identity.platform_name &&
               StartsWith(identity.platform_version, row.platform_version);
      });
  const bool is_known = known != std::end(kKnownHosts);
  Handover handover = Handover::kCopy;
  bool has_native_buffers = false;
  if (setting == "address") {
    // Of an unknown host the user may know it; of these we know better.
    if (is_known && known->handover == Handover::kCopy) {
      return Status(Code::kFailedPrecondition,
                    std::string("JAX_FLASH_METAL_HOST_BUFFERS=address cannot be: the pointers "
                                "of ") +
                        known->name + " are no addresses; leave it out, or say copy.");
    }
    handover = Handover::kAddress;
  } else if (setting == "auto") {
    if (!is_known) return Refuse(identity);
    handover = known->handover;
    // Without our own Metal device (a build for tests, or a GPU that it refuses) the
    // handlers have no use for objects.
    has_native_buffers = known->has_native_buffers && HasNativeBuffers();
  } else if (setting != "copy") {
    return InvalidArgument(
        "the host's buffers can be used by 'auto', 'address' or 'copy', but got '" + setting +
        "'.");
  }
  // Results are made by a function that the oldest hosts lack.
  if (handover == Handover::kAddress && !host.Has(Slot::kClient_CreateUninitializedBuffer)) {
    handover = Handover::kAddressAndCopy;
  }
  HostAccess access = AccessBy(handover);
  if (has_native_buffers) {
    access.native = &NativeAccess();
    access.handover = "native";
    access.host_may_overwrite = false;
  }
  return access;
}

}  // namespace jfm::pjrt
