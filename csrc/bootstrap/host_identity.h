// Which processes share a node.
#pragma once

#include <string>

namespace multicomm::bootstrap {

// Equal text = same node: such processes can share memory and reach each other on the loopback. Made of hostname, boot
// id, network and process namespace, and /dev/shm, so that containers of one machine count as nodes of their own where
// they are apart.
std::string host_identity();

std::string host_name();

std::string boot_id();  // of the kernel that runs: another one after each boot

}  // namespace multicomm::bootstrap
