// The process-wide state and its locks.
#include "plugin/pjrt/plugin.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace jfm::pjrt {
namespace {

// Guards the making of the plugin; afterwards it is read only, and never destroyed: threads
// of the host may outlive main().
std::mutex configure_mutex;
std::atomic<Plugin*> the_plugin{nullptr};

std::mutex clients_mutex;  // guards the map
auto& clients = *new std::unordered_map<PJRT_Client*, std::shared_ptr<const ClientState>>;

std::atomic<bool> is_forked{false};

}  // namespace

bool Settings::operator==(const Settings& other) const {
  return host_path == other.host_path && platform_name == other.platform_name &&
         host_buffers == other.host_buffers && flags == other.flags && partition == other.partition;
}

Status ConfigurePlugin(const Settings& settings) {
  std::lock_guard<std::mutex> lock(configure_mutex);
  if (const Plugin* plugin = the_plugin.load()) {
    if (plugin->settings == settings) return {};
    return {Code::kFailedPrecondition,
            "the plugin runs over the host " + plugin->settings.host_path +
                " already; another one, or other settings, need another process."};
  }
  if (settings.partition == nullptr) return InvalidArgument("the partition function is missing.");
  Result<std::unique_ptr<const Host>> host = Host::Load(settings.host_path);
  if (!host.ok()) return host.status();
  Plugin* plugin = new Plugin;
  plugin->settings = settings;
  plugin->host = std::move(*host);
  pthread_atfork(nullptr, nullptr, [] { is_forked.store(true); });
  the_plugin.store(plugin);
  return {};
}

const Plugin* ThePlugin() { return the_plugin.load(std::memory_order_acquire); }

std::shared_ptr<const ClientState> FindClient(PJRT_Client* client) {
  std::lock_guard<std::mutex> lock(clients_mutex);
  const auto found = clients.find(client);
  return found == clients.end() ? nullptr : found->second;
}

std::shared_ptr<const ClientState> FindClientOf(const PJRT_Device* device) {
  std::lock_guard<std::mutex> lock(clients_mutex);
  for (const auto& [client, state] : clients) {
    if (state->device.device == device) return state;
  }
  return nullptr;
}

std::shared_ptr<const ClientState> AnyClient() {
  std::lock_guard<std::mutex> lock(clients_mutex);
  return clients.empty() ? nullptr : clients.begin()->second;
}

Status AddClient(PJRT_Client* client) {
  const Plugin& plugin = *ThePlugin();
  const Host& host = *plugin.host;
  if (client == nullptr) return WrongAnswer(Slot::kClient_Create, "gave no client");
  auto state = std::make_shared<ClientState>();
  state->device.host = &host;
  state->device.client = client;

  Result<HostIdentity> identity = IdentityOf(host, client);
  if (!identity.ok()) return identity.status();
  state->identity = std::move(*identity);
  Result<HostAccess> access = ChooseAccess(host, state->identity, plugin.settings.host_buffers);
  if (!access.ok()) return access.status();
  state->access = *access;

  PJRT_Client_AddressableDevices_Args devices = {};
  devices.client = client;
  if (Status status = host.Call(devices); !status.ok()) return status;
  if (devices.num_addressable_devices != 1) {
    return Status(Code::kFailedPrecondition, "the host plugin must offer one device, but it has " +
                                                 std::to_string(devices.num_addressable_devices) +
                                                 ".");
  }
  if (devices.addressable_devices == nullptr || devices.addressable_devices[0] == nullptr) {
    return WrongAnswer(devices.kSlot, "gave no device");
  }
  state->device.device = devices.addressable_devices[0];

  PJRT_Device_DefaultMemory_Args memory = {};
  memory.device = state->device.device;
  // Old hosts have no memory spaces, and say so with an error.
  if (host.Call(memory).ok()) state->device.memory = memory.memory;

  std::lock_guard<std::mutex> lock(clients_mutex);
  clients[client] = std::move(state);
  return {};
}

void RemoveClient(PJRT_Client* client) {
  std::lock_guard<std::mutex> lock(clients_mutex);
  clients.erase(client);
}

Status CheckNotForked() {
  if (!is_forked.load(std::memory_order_relaxed)) return {};
  return {Code::kFailedPrecondition,
          "this process was forked from one in which the platform " +
              ThePlugin()->settings.platform_name +
              " had started, and its threads did not come along; start worker processes before "
              "the first use of JAX, or by multiprocessing's 'spawn'."};
}

}  // namespace jfm::pjrt
