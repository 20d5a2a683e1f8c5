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

}  // namespace

Messages::Messages(MPI_Comm communicator, Requests& requests, int64_t largest_count)
    : communicator_(communicator), requests_(requests), largest_bytes_(static_cast<uint64_t>(largest_count)) {
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
  if (sink != nullptr || !listening_) return;
  requests_.cancel(header_receive_);
  listening_ = false;
}

int Messages::payload_tag(uint64_t number) const {
  return kFirstPayloadTag + static_cast<int>(number % static_cast<uint64_t>(tag_limit_ - kFirstPayloadTag));
}

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
  if (--remaining == 0) owner->end(*this);
}

void Messages::end(Transfer& transfer) {
  const OperationPtr operation = std::move(transfer.operation);
  ErrorPtr error = std::move(transfer.error);
  transfers_.erase(transfer.self);
  sink_->point_to_point_done(operation, std::move(error));
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
  Transfer& transfer = new_transfer(operation);
  transfer.packet = std::make_unique<Packet>();
  const auto bytes = static_cast<uint64_t>(operation->bytes());
  const std::byte* data = operation->inputs.front().data;
  Header& header = transfer.packet->header;
  header = {bytes, next_number_[static_cast<size_t>(operation->peer)]++, operation->tag, bytes <= kEagerBytes ? 1 : 0};
  if (header.eager != 0 && bytes > 0) std::memcpy(transfer.packet->payload, data, bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  const size_t length = sizeof(Header) + (header.eager != 0 ? bytes : 0);
  check(MPI_Isend(transfer.packet.get(), static_cast<int>(length), MPI_BYTE, operation->peer, kHeaderTag, communicator_,
                  &request),
        "MPI_Isend");
  start(transfer, request);
  if (header.eager == 0) {
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
  for (const OperationPtr& operation : std::exchange(waiting_, {})) sink_->point_to_point_done(operation, error);
}

void Messages::take_header(const MPI_Status& status) {
  std::unique_ptr<Packet> packet = std::move(incoming_);
  const int source = status.MPI_SOURCE;
  int received = 0;
  MPI_Get_count(&status, MPI_BYTE, &received);
  const Header& header = packet->header;
  const bool fits = header.eager == 0 ? header.bytes < INT64_MAX : header.bytes <= kEagerBytes;
  if (!fits || static_cast<size_t>(received) != sizeof(Header) + (header.eager == 0 ? 0 : header.bytes))
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

void Messages::deliver(const OperationPtr& operation, int source, std::unique_ptr<Packet> packet) {
  const Header& header = packet->header;
  const auto expected = static_cast<uint64_t>(operation->bytes());
  std::unique_ptr<std::byte[]> scratch;
  if (header.bytes != expected || operation->abandoned) {
    try {
      scratch = std::make_unique_for_overwrite<std::byte[]>(header.bytes + 1);
    } catch (const std::bad_alloc&) {  // of this message alone, whatever its header claims
      sink_->point_to_point_done(
          operation, std::make_shared<const OperationError>(OperationError{
                         ErrorKind::kBroken, "no memory for a message of " + std::to_string(header.bytes) + " bytes"}));
      return;
    }
  }
  Transfer& transfer = new_transfer(operation);
  transfer.scratch = std::move(scratch);
  operation->peer = source;
  if (header.bytes != expected) {
    std::ostringstream text;
    text << "the tensor holds " << expected << " bytes, but the message has " << header.bytes
         << ". The message is discarded; send and receive tensors of one size and dtype.";
    transfer.error = std::make_shared<const OperationError>(OperationError{ErrorKind::kUsage, text.str()});
  }
  std::byte* to = transfer.scratch ? transfer.scratch.get() : operation->outputs.front().data;
  if (header.eager != 0) {
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
