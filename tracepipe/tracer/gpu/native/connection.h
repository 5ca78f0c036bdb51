// SPDX-License-Identifier: MIT
// The connection of a traced process to the capture process, which channel.py describes.
//
// It transfers the descriptor of the channel's memory, and its end marks the end of the recording: the
// capture process has shut down its side, or has died.
#pragma once
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

namespace tracepipe {

// getpid without a system call for each record; a fork sets it again (Connection::open).
inline std::atomic<pid_t> &this_process() {
    static std::atomic<pid_t> id{getpid()};
    return id;
}

class Connection {
  public:
    // Connects to the abstract socket of that name; returns the memory's descriptor, −1 if there is none.
    int open(const char *name) {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        size_t length = strlen(name);
        if (length + 1 > sizeof address.sun_path) return -1;
        memcpy(address.sun_path + 1, name, length);
        int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (made < 0) return -1;
        // A high number, as a program may expect its own files at low numbers.
        int high = fcntl(made, F_DUPFD_CLOEXEC, HIGH);
        if (high >= 0) ::close(made), made = high;
        timeval patience{PATIENCE_S, 0};
        setsockopt(made, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
        auto size = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length);
        struct stat status;
        int memory = -1;
        if (connect(made, reinterpret_cast<sockaddr *>(&address), size) == 0 && is_ours(made) &&
            fstat(made, &status) == 0)
            memory = receive(made);
        if (memory < 0) return ::close(made), -1;
        inode_ = status.st_ino, device_ = status.st_dev;
        socket_ = made;
        // A fork would keep the connection up when this process is gone.
        static Connection *only;
        if (!only) pthread_atfork(nullptr, nullptr, [] { this_process() = getpid(), only->close(); });
        only = this;
        return memory;
    }
    // Whether the recording is over.
    bool is_over() const { return events() != 0; }
    // Waits for that, or for the end of the connection.
    void wait_until_over() const {
        pollfd look{socket_, POLLIN | POLLRDHUP, 0};
        while (poll(&look, 1, -1) < 0 && errno == EINTR) {}
    }
    // Whether the capture process is gone.
    bool is_gone() const { return (events() & (POLLHUP | POLLERR | POLLNVAL)) != 0; }
    // Tells the capture process a number, unless many are unread; never waits.
    void tell(uint32_t number) {
        int made = socket_;
        if (made >= 0 && is_still(made)) send(made, &number, sizeof number, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    // Tells the capture process that no more records follow.
    void close() {
        int made = socket_.exchange(-1);
        if (made >= 0 && is_still(made)) ::close(made);
    }

  private:
    static constexpr int HIGH = 512;
    static constexpr time_t PATIENCE_S = 5;  // a busy capture process answers in milliseconds

    // Nothing is ever sent after the descriptor, so any event on the connection is its end.
    int events() const {
        int made = socket_;
        if (made < 0 || !is_still(made)) return POLLNVAL;
        pollfd look{made, POLLIN | POLLRDHUP, 0};
        return poll(&look, 1, 0) > 0 ? look.revents : 0;
    }
    // Programs close descriptors that they did not open, and then the number can be another file's.
    bool is_still(int made) const {
        struct stat status;
        return fstat(made, &status) == 0 && status.st_ino == inode_ && status.st_dev == device_;
    }
    // The name is free when the capture process has ended. So the listener must be this user or root.
    static bool is_ours(int made) {
        ucred peer{};
        socklen_t size = sizeof peer;
        if (getsockopt(made, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
        return peer.uid == 0 || peer.uid == geteuid();
    }
    static int receive(int made) {
        char byte;
        iovec place{&byte, 1};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
        msghdr message{};
        message.msg_iov = &place, message.msg_iovlen = 1;
        message.msg_control = control, message.msg_controllen = sizeof control;
        ssize_t got;
        do got = recvmsg(made, &message, MSG_CMSG_CLOEXEC);
        while (got < 0 && errno == EINTR);
        cmsghdr *head = got == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
        if (!head || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) return -1;
        int memory;
        memcpy(&memory, CMSG_DATA(head), sizeof memory);
        return memory;
    }

    std::atomic<int> socket_{-1};
    ino_t inode_ = 0;
    dev_t device_ = 0;
};

}  // namespace tracepipe
