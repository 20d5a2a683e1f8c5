// Point-to-point operations of one group: headers, payloads, one matching queue.
#pragma once

#include <cstddef>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/mpi/requests.h"

namespace multicomm::mpi {

// A message of a plane of ours, told to it instead of to the engine. Its tag is below 0 and its peer known.
class OwnMessage : public Operation {
 public:
  virtual void over(const ErrorPtr& error) = 0;
};

// A message is a header (tag, size, and the payload itself where it is small), then the payload on an MPI tag of its
// own. The receiver knows the size before it takes the payload, so a mismatch is an error that states both sizes
// instead of a truncation; and receives from a given or from any source stand in one queue, in the order in which they
// were posted.
//
// A message between devices has a handshake instead of a payload: the header carries the sender's introduction; the
// receiver, when its receive is there, answers with its own and its proposal for the launch order; the sender, who then
// knows the place, tells it. The payload is the devices' business.
class Messages {
 public:
  // `device`: moves messages between devices; null where there is none.
  Messages(MPI_Comm communicator, Requests& requests, int64_t largest_count, DevicePlane* device);
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  void post(const OperationPtr& operation);
  void set_sink(PointToPointSink* sink);
  // Whether nothing is in flight. A device send that waits for its receiver has nothing but its own memory in MPI's
  // hands.
  bool idle() const;

 private:
  static constexpr size_t kEagerBytes = 2048;
  enum class Form : int32_t { kPayloadFollows, kEager, kDevice, kMark };
  struct Header {
    uint64_t bytes;
    uint64_t number;  // of this sender's message to this receiver: chooses the payload's MPI tag
    int32_t tag;
    Form form;
  };
  static constexpr Header kMark{0, 0, 0, Form::kMark};
  struct Packet {
    Header header;
    std::byte payload[kEagerBytes];
  };
  struct Arrived {
    int source;
    std::unique_ptr<Packet> packet;
  };
  // The receiver's part of a handshake, then the sender's last word.
  struct Handshake {
    uint64_t refused;
    uint64_t proposal;
    TableEntry introduction;  // or why it is refused
    uint64_t timestamp;
  };
  struct Transfer final : RequestHandler {
    Messages* owner = nullptr;
    OperationPtr operation;
    std::unique_ptr<Packet> packet;        // sends: the header in flight
    std::unique_ptr<std::byte[]> scratch;  // receives whose output must not be touched
    std::unique_ptr<Handshake> handshake;
    uint64_t number = 0;  // as in Header
    bool awaits_answer() const { return next == &Messages::send_timestamp && remaining == 1; }
    ErrorPtr error;
    int remaining = 1;
    void (Messages::*next)(Transfer&) = &Messages::end;  // when all its requests are over
    std::list<Transfer>::iterator self;
    void request_done(const MPI_Status& status, const std::string* failure) override;
  };
  struct HeaderReceive final : RequestHandler {
    Messages* owner = nullptr;
    void request_done(const MPI_Status& status, const std::string* failure) override {
      owner->on_header(status, failure);
    }
  };

  void send(const OperationPtr& operation);
  void send_now(const OperationPtr& operation);
  void mark(int peer);
  void listen();
  void fail_waiting(const std::string& why);
  void take_header(const MPI_Status& status);
  void on_header(const MPI_Status& status, const std::string* failure);
  void deliver(const OperationPtr& operation, int source, std::unique_ptr<Packet> packet);
  void shake_hands(const OperationPtr& operation, int source, const Packet& packet);
  void receive_timestamp(Transfer& transfer);
  void send_timestamp(Transfer& transfer);
  void end_ordered(Transfer& transfer);
  void forget(Transfer& transfer) { transfers_.erase(transfer.self); }
  std::string introduced(const Operation& operation, const TableEntry& mine, const TableEntry& theirs);
  void report(const OperationPtr& operation, ErrorPtr error);
  Transfer& new_transfer(const OperationPtr& operation);
  void start(Transfer& transfer, MPI_Request request);
  void end(Transfer& transfer);
  int payload_tag(uint64_t number) const;
  int answer_tag(uint64_t number) const;  // from the receiver
  template <typename Call>
  void in_chunks(uint64_t bytes, Call call) const;

  MPI_Comm communicator_;
  Requests& requests_;
  const uint64_t largest_bytes_;
  DevicePlane* const device_;
  int rank_ = 0;
  int size_ = 1;
  int tag_limit_ = 32767;
  PointToPointSink* sink_ = nullptr;
  std::vector<uint64_t> next_number_;  // per receiver
  // MPI counts the messages between two ranks in 16 bits (Open MPI 5 does): with more than that unreceived, it
  // exchanges them. So every kWindow-th header is one that MPI reports as received, and with kWindows of those
  // outstanding further messages wait here. Receivers that have had so many are few, so it is not a field for each.
  static constexpr uint64_t kWindow = 4096;
  static constexpr size_t kWindows = 2;
  struct Flow final : RequestHandler {
    Messages* owner = nullptr;
    size_t outstanding = 0;
    std::deque<OperationPtr> held;
    void request_done(const MPI_Status& status, const std::string* failure) override;
  };
  std::map<int, Flow> flows_;         // by receiver
  std::deque<OperationPtr> waiting_;  // receives without a message
  std::deque<Arrived> unexpected_;    // messages without a receive
  std::list<Transfer> transfers_;
  HeaderReceive header_receive_;
  std::unique_ptr<Packet> incoming_;
  bool listening_ = false;
};

}  // namespace multicomm::mpi
