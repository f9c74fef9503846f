// What the plugin knows once it is configured: the host, the settings, the clients. One
// per process, because JAX loads a plugin once per process.
#pragma once

#include <memory>
#include <string>

#include "plugin/pjrt/buffers.h"
#include "plugin/pjrt/host.h"
#include "plugin/pjrt/hosts/known_hosts.h"
#include "plugin/pjrt/pjrt_c_api.h"
#include "plugin/status.h"

namespace jfm::pjrt {

struct Settings {
  std::string host_path;
  std::string platform_name;  // what JAX shall see
  std::string host_buffers;   // "auto", "address" or "copy"
  int flags = 0;              // JFM_HIDE_OPTIMIZED_PROGRAM
  JfmPartitionFunction partition = nullptr;

  bool operator==(const Settings& other) const;
};

struct Plugin {
  Settings settings;
  std::unique_ptr<const Host> host;

  // Like jax-metal: older than extensions, attributes and memory spaces. Every program is
  // rewritten for such a host, and old_host.cc answers what it cannot.
  bool is_old_host() const { return host->minor() < kOldHostMinor; }
  // Below it jaxlib 0.4.34 itself writes programs that such a host can read.
  static constexpr int kOldHostMinor = 54;
};

// Errors: another configuration is in place, or the host cannot be loaded.
Status ConfigurePlugin(const Settings& settings);

// Null before it is configured.
const Plugin* ThePlugin();

// A client of the host that exists, as plans need it.
struct ClientState {
  Device device;
  HostIdentity identity;
  HostAccess access;
};
// Null for a client that we did not create.
std::shared_ptr<const ClientState> FindClient(PJRT_Client* client);
std::shared_ptr<const ClientState> FindClientOf(const PJRT_Device* device);
// Any client that exists, or null.
std::shared_ptr<const ClientState> AnyClient();
Status AddClient(PJRT_Client* client);
void RemoveClient(PJRT_Client* client);

// Not OK in a process that was forked off after the plugin had started: neither the
// host's threads nor ours exist there.
Status CheckNotForked();

}  // namespace jfm::pjrt
