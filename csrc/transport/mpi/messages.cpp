#include "transport/mpi/messages.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace multicomm::mpi {
namespace {

constexpr int kHeaderTag = 0;
constexpr int kFirstPayloadTag = 1;

bool on_device(const Operation& operation) { return operation.descriptor.device != DeviceKind::kCpu; }

ErrorPtr usage_error(std::string text) {
  return std::make_shared<const OperationError>(OperationError{ErrorKind::kUsage, std::move(text)});
}

// The same on both sides, and no other message's of the group for as long as it could be confused; beside the numbers
// of the group's collectives.
uint64_t device_message_number(int source, int target, uint64_t number) {
  return (uint64_t{1} << 63) | (static_cast<uint64_t>(source) & 0xfffff) << 43 |
         (static_cast<uint64_t>(target) & 0xfffff) << 23 | (number & 0x7fffff);
}

}  // namespace

Messages::Messages(MPI_Comm communicator, Requests& requests, int64_t largest_count, DevicePlane* device)
    : communicator_(communicator),
      requests_(requests),
      largest_bytes_(static_cast<uint64_t>(largest_count)),
      device_(device) {
  check(MPI_Comm_rank(communicator, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(communicator, &size_), "MPI_Comm_size");
  int* limit = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(communicator, MPI_TAG_UB, &limit, &found), "MPI_Comm_get_attr");
  if (found != 0) tag_limit_ = *limit;
  next_number_.resize(static_cast<size_t>(size_));
  header_receive_.owner = this;
}

void Messages::set_sink(PointToPointSink* sink) {
  sink_ = sink;
  if (sink != nullptr) return;
  std::erase_if(transfers_, [this](Transfer& transfer) {
    if (!transfer.awaits_answer()) return false;
    requests_.cancel(transfer);
    return true;
  });
  for (auto& [peer, flow] : flows_)  // nobody receives any more, and what MPI still has of a mark is constant
    for (; flow.outstanding > 0; --flow.outstanding) requests_.cancel(flow);
  if (!std::exchange(listening_, false)) return;
  requests_.cancel(header_receive_);
}

bool Messages::idle() const {
  return std::all_of(transfers_.begin(), transfers_.end(), [](const Transfer& t) { return t.awaits_answer(); }) &&
         std::all_of(flows_.begin(), flows_.end(), [](const auto& flow) { return flow.second.held.empty(); });
}

int Messages::payload_tag(uint64_t number) const {
  return kFirstPayloadTag + static_cast<int>(number % static_cast<uint64_t>((tag_limit_ - kFirstPayloadTag) / 2));
}

int Messages::answer_tag(uint64_t number) const { return payload_tag(number) + (tag_limit_ - kFirstPayloadTag) / 2; }

template <typename Call>
void Messages::in_chunks(uint64_t bytes, Call call) const {
  for (uint64_t offset = 0; offset < bytes; offset += largest_bytes_) {
    call(offset, static_cast<int>(std::min(bytes - offset, largest_bytes_)));
  }
}

Messages::Transfer& Messages::new_transfer(const OperationPtr& operation) {
  Transfer& transfer = transfers_.emplace_back();
  transfer.owner = this;
  transfer.operation = operation;
  transfer.self = std::prev(transfers_.end());
  return transfer;
}

void Messages::start(Transfer& transfer, MPI_Request request) {
  ++transfer.remaining;
  requests_.add(request, transfer);
}

void Messages::Transfer::request_done(const MPI_Status&, const std::string* failure) {
  if (failure != nullptr && !error)
    error = std::make_shared<const OperationError>(OperationError{ErrorKind::kBroken, *failure});
  if (--remaining > 0) return;
  if (error && operation) next = &Messages::end;
  (owner->*next)(*this);
}

void Messages::report(const OperationPtr& operation, ErrorPtr error) {
  if (auto* own = dynamic_cast<OwnMessage*>(operation.get())) return own->over(error);
  sink_->point_to_point_done(operation, std::move(error));
}

void Messages::end(Transfer& transfer) {
  const OperationPtr operation = std::move(transfer.operation);
  ErrorPtr error = std::move(transfer.error);
  transfers_.erase(transfer.self);
  report(operation, std::move(error));
}

void Messages::post(const OperationPtr& operation) {
  if (operation->descriptor.kind == OpKind::kSend) return send(operation);
  const auto it = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Arrived& a) {
    return a.packet->header.tag == operation->tag && (operation->peer < 0 || operation->peer == a.source);
  });
  if (it != unexpected_.end()) {
    Arrived arrived = std::move(*it);
    unexpected_.erase(it);
    return deliver(operation, arrived.source, std::move(arrived.packet));
  }
  waiting_.push_back(operation);
  listen();
}

void Messages::send(const OperationPtr& operation) {
  const auto flow = flows_.find(operation->peer);
  const bool held = flow != flows_.end() && (flow->second.outstanding >= kWindows || !flow->second.held.empty());
  if (held) flow->second.held.push_back(operation);
  else send_now(operation);
}

void Messages::Flow::request_done(const MPI_Status&, const std::string* failure) {
  --outstanding;
  while (!held.empty() && (outstanding < kWindows || failure != nullptr)) {
    const OperationPtr operation = std::move(held.front());
    held.pop_front();
    const auto fail = [&](const std::string& why) {
      owner->report(operation, std::make_shared<const OperationError>(OperationError{ErrorKind::kBroken, why}));
    };
    if (failure != nullptr) {
      fail(*failure);
      continue;
    }
    try {
      owner->send_now(operation);
    } catch (const std::runtime_error& error) {
      fail(error.what());
    }
  }
}

void Messages::send_now(const OperationPtr& operation) {
  Transfer& transfer = new_transfer(operation);
  transfer.packet = std::make_unique<Packet>();
  const auto bytes = static_cast<uint64_t>(operation->bytes());
  const std::byte* data = operation->inputs.front().data;
  Header& header = transfer.packet->header;
  const bool device = on_device(*operation);
  header = {bytes, next_number_[static_cast<size_t>(operation->peer)]++, operation->tag,
            device                 ? Form::kDevice
            : bytes <= kEagerBytes ? Form::kEager
                                   : Form::kPayloadFollows};
  transfer.number = header.number;
  size_t attached = header.form == Form::kEager ? bytes : 0;
  if (attached > 0) std::memcpy(transfer.packet->payload, data, bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  if (device) {
    if (device_ == nullptr) throw std::runtime_error("this group moves no device tensors");
    TableEntry mine{};
    device_->introduce(operation->peer, *operation, mine);
    attached = sizeof(mine);
    std::memcpy(transfer.packet->payload, &mine, sizeof(mine));
    transfer.handshake = std::make_unique<Handshake>();
    transfer.next = &Messages::send_timestamp;
    check(MPI_Irecv(transfer.handshake.get(), static_cast<int>(sizeof(Handshake)), MPI_BYTE, operation->peer,
                    answer_tag(header.number), communicator_, &request),
          "MPI_Irecv");
    start(transfer, request);
  }
  const size_t length = sizeof(Header) + attached;
  check(MPI_Isend(transfer.packet.get(), static_cast<int>(length), MPI_BYTE, operation->peer, kHeaderTag, communicator_,
                  &request),
        "MPI_Isend");
  start(transfer, request);
  if ((header.number + 1) % kWindow == 0) mark(operation->peer);
  if (header.form == Form::kPayloadFollows) {
    operation->exposed = !operation->owns_buffers;
    in_chunks(bytes, [&](uint64_t offset, int piece) {
      check(MPI_Isend(data + offset, piece, MPI_BYTE, operation->peer, payload_tag(header.number), communicator_,
                      &request),
            "MPI_Isend");
      start(transfer, request);
    });
  }
  --transfer.remaining;  // all requests are on their way; they end it in poll()
}

// A message of its own, which MPI reports as done when the receiver has taken it, and with it all before it.
void Messages::mark(int peer) {
  Flow& flow = flows_[peer];
  flow.owner = this;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Issend(&kMark, static_cast<int>(sizeof(kMark)), MPI_BYTE, peer, kHeaderTag, communicator_, &request),
        "MPI_Issend");
  ++flow.outstanding;
  requests_.add(request, flow);
}

void Messages::listen() {
  if (listening_ || waiting_.empty()) return;
  listening_ = true;
  if (!incoming_) incoming_ = std::make_unique<Packet>();
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Irecv(incoming_.get(), static_cast<int>(sizeof(Packet)), MPI_BYTE, MPI_ANY_SOURCE, kHeaderTag,
                  communicator_, &request),
        "MPI_Irecv");
  requests_.add(request, header_receive_);
}

void Messages::on_header(const MPI_Status& status, const std::string* failure) {
  listening_ = false;
  if (failure != nullptr) return fail_waiting(*failure);
  try {
    take_header(status);
  } catch (const std::runtime_error& error) {  // MPI refuses to receive
    fail_waiting(error.what());
  } catch (const std::bad_alloc&) {
    fail_waiting("no memory for a message");
  }
}

void Messages::fail_waiting(const std::string& why) {
  const auto error = std::make_shared<const OperationError>(OperationError{ErrorKind::kBroken, "receive: " + why});
  for (const OperationPtr& operation : std::exchange(waiting_, {})) report(operation, error);
}

void Messages::take_header(const MPI_Status& status) {
  std::unique_ptr<Packet> packet = std::move(incoming_);
  const int source = status.MPI_SOURCE;
  int received = 0;
  MPI_Get_count(&status, MPI_BYTE, &received);
  const Header& header = packet->header;
  if (received == static_cast<int>(sizeof(kMark)) && header.form == Form::kMark) {
    incoming_ = std::move(packet);
    return listen();
  }
  const bool known =
      header.form == Form::kPayloadFollows || header.form == Form::kEager || header.form == Form::kDevice;
  const bool fits = known && (header.form == Form::kEager ? header.bytes <= kEagerBytes : header.bytes < INT64_MAX);
  const size_t attached = header.form == Form::kEager    ? header.bytes
                          : header.form == Form::kDevice ? sizeof(TableEntry)
                                                         : 0;
  if (!fits || static_cast<size_t>(received) != sizeof(Header) + attached)
    throw std::runtime_error("rank " + std::to_string(source) + " of the group sent what is no message");
  const auto it = std::find_if(waiting_.begin(), waiting_.end(), [&](const OperationPtr& o) {
    return o->tag == packet->header.tag && (o->peer < 0 || o->peer == source);
  });
  if (it == waiting_.end()) {
    unexpected_.push_back({source, std::move(packet)});
  } else {
    const OperationPtr operation = std::move(*it);
    waiting_.erase(it);
    deliver(operation, source, std::move(packet));
  }
  listen();
}

std::string Messages::introduced(const Operation& operation, const TableEntry& mine, const TableEntry& theirs) {
  const bool first = rank_ < operation.peer;
  return device_->introduced(operation.peer, first ? std::vector{mine, theirs} : std::vector{theirs, mine});
}

// The receiver's part: both ends are there.
void Messages::shake_hands(const OperationPtr& operation, int source, const Packet& packet) {
  const Header& header = packet.header;
  Transfer& transfer = new_transfer(operation);
  operation->peer = source;
  transfer.number = header.number;
  transfer.handshake = std::make_unique<Handshake>();
  Handshake& hands = *transfer.handshake;
  std::string why;
  try {
    if (!on_device(*operation)) {
      why = "the message is a tensor on a device, the tensor to receive it is on the CPU";
    } else if (header.bytes != static_cast<uint64_t>(operation->bytes())) {
      why = "the tensor to receive it holds " + std::to_string(operation->bytes()) + " bytes, the message has " +
            std::to_string(header.bytes);
    } else {
      TableEntry theirs{};
      std::memcpy(&theirs, packet.payload, sizeof(theirs));
      device_->introduce(source, *operation, hands.introduction);
      why = introduced(*operation, hands.introduction, theirs);
    }
  } catch (const std::runtime_error& error) {
    why = error.what();
  }
  if (why.empty()) {
    hands.proposal = sink_->message_matched(operation, device_message_number(source, rank_, header.number));
    transfer.next = &Messages::end_ordered;
  } else {
    hands.refused = 1;
    why.copy(hands.introduction.text, sizeof(hands.introduction.text) - 1);
    transfer.error = usage_error(why + ". Nothing was moved, and the group can be used further.");
  }
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Isend(&hands, static_cast<int>(sizeof(hands)), MPI_BYTE, source, answer_tag(header.number), communicator_,
                  &request),
        "MPI_Isend");
  start(transfer, request);
  if (hands.refused == 0) {
    transfer.packet = std::make_unique<Packet>();  // apart from what is being sent
    check(MPI_Irecv(transfer.packet.get(), static_cast<int>(sizeof(uint64_t)), MPI_BYTE, source,
                    payload_tag(header.number), communicator_, &request),
          "MPI_Irecv");
    start(transfer, request);
  }
  --transfer.remaining;
}

void Messages::end_ordered(Transfer& transfer) {
  OperationPtr operation = std::move(transfer.operation);
  uint64_t timestamp = 0;
  std::memcpy(&timestamp, transfer.packet.get(), sizeof(timestamp));
  transfers_.erase(transfer.self);
  sink_->message_ordered(std::move(operation), timestamp);
}

// The sender's part: the receiver has answered.
void Messages::send_timestamp(Transfer& transfer) {
  const OperationPtr& operation = transfer.operation;
  Handshake& hands = *transfer.handshake;
  std::string why;
  if (hands.refused == 0) {
    TableEntry mine{};
    std::memcpy(&mine, transfer.packet->payload, sizeof(mine));
    why = introduced(*operation, mine, hands.introduction);  // what the receiver has found, too
  } else {
    hands.introduction.text[sizeof(hands.introduction.text) - 1] = 0;
    why = hands.introduction.text;
  }
  if (!why.empty()) {
    transfer.error = usage_error(why + ". Nothing was moved, and the group can be used further.");
    return end(transfer);
  }
  const uint64_t own =
      sink_->message_matched(operation, device_message_number(rank_, operation->peer, transfer.number));
  hands.timestamp = std::max(own, hands.proposal);
  MPI_Request request = MPI_REQUEST_NULL;
  try {
    check(MPI_Isend(&hands.timestamp, static_cast<int>(sizeof(hands.timestamp)), MPI_BYTE, operation->peer,
                    payload_tag(transfer.number), communicator_, &request),
          "MPI_Isend");
  } catch (const std::runtime_error& error) {
    transfer.error = std::make_shared<const OperationError>(OperationError{ErrorKind::kBroken, error.what()});
    return end(transfer);
  }
  transfer.next = &Messages::forget;
  const uint64_t timestamp = hands.timestamp;
  start(transfer, request);
  sink_->message_ordered(std::move(transfer.operation), timestamp);
}

void Messages::deliver(const OperationPtr& operation, int source, std::unique_ptr<Packet> packet) {
  const Header& header = packet->header;
  if (header.form == Form::kDevice) return shake_hands(operation, source, *packet);
  const auto expected = static_cast<uint64_t>(operation->bytes());
  const bool wrong_place = on_device(*operation);
  std::unique_ptr<std::byte[]> scratch;
  if (header.bytes != expected || wrong_place || operation->abandoned) {
    try {
      scratch = std::make_unique_for_overwrite<std::byte[]>(header.bytes + 1);
    } catch (const std::bad_alloc&) {  // of this message alone, whatever its header claims
      report(operation,
             std::make_shared<const OperationError>(OperationError{
                 ErrorKind::kBroken, "no memory for a message of " + std::to_string(header.bytes) + " bytes"}));
      return;
    }
  }
  Transfer& transfer = new_transfer(operation);
  transfer.scratch = std::move(scratch);
  operation->peer = source;
  if (wrong_place) {
    transfer.error = usage_error(
        "the message is a CPU tensor, the tensor to receive it is on a device. The message is discarded; send and "
        "receive tensors of one kind of device.");
  } else if (header.bytes != expected) {
    std::ostringstream text;
    text << "the tensor holds " << expected << " bytes, but the message has " << header.bytes
         << ". The message is discarded; send and receive tensors of one size and dtype.";
    transfer.error = usage_error(text.str());
  }
  std::byte* to = transfer.scratch ? transfer.scratch.get() : operation->outputs.front().data;
  if (header.form == Form::kEager) {
    if (header.bytes > 0) std::memcpy(to, packet->payload, header.bytes);
  } else {
    operation->exposed = transfer.scratch == nullptr && !operation->owns_buffers;
    try {
      in_chunks(header.bytes, [&](uint64_t offset, int piece) {
        MPI_Request request = MPI_REQUEST_NULL;
        check(MPI_Irecv(to + offset, piece, MPI_BYTE, source, payload_tag(header.number), communicator_, &request),
              "MPI_Irecv");
        start(transfer, request);
      });
    } catch (const std::runtime_error& error) {  // of this message: it ends with what was started of it
      transfer.error = std::make_shared<const OperationError>(OperationError{ErrorKind::kBroken, error.what()});
    }
  }
  if (--transfer.remaining == 0) end(transfer);
}

}  // namespace multicomm::mpi
