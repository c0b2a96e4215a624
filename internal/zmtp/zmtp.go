// SPDX-License-Identifier: Apache-2.0

// Package zmtp speaks ZMTP 3.0, the protocol of ZeroMQ sockets, as far as KV
// events need it: PUB and SUB, DEALER and ROUTER, over TCP and Unix sockets,
// without encryption. libzmq's sockets are the peers that it is made for.
//
// The package has connections instead of sockets. A ZeroMQ socket hides the loss of its
// connection; a subscriber of cache events must know, because events get lost and processes
// restart at that moment.
//
// # Guarantees
//
// A message is read whole or not at all. A peer can make us keep at most
// [maxMessage] bytes, and only twice as many as it has sent. A peer that says nothing
// costs a goroutine and a connection for [handshakeTime].
//
// # Concurrency
//
// One goroutine may read from a [Conn] and any number may write to it.
package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

// Role is the type of a ZeroMQ socket.
type Role string

// The roles.
const (
	Pub    Role = "PUB"
	Sub    Role = "SUB"
	Dealer Role = "DEALER"
	Router Role = "ROUTER"
)

// fits reports whether a socket of role r can talk to the peer's role.
func (r Role) fits(peer string) bool {
	return slices.Contains(map[Role][]string{
		Pub: {"SUB", "XSUB"}, Sub: {"PUB", "XPUB"}, Dealer: {"ROUTER", "DEALER", "REP"}, Router: {"DEALER", "REQ", "ROUTER"},
	}[r], peer)
}

const (
	// maxMessage limits the bytes of a message. A batch of an engine has some kilobytes; replays
	// arrive batch by batch.
	maxMessage = 64 << 20
	// maxRequest limits the messages that PUB and ROUTER sockets receive: subscriptions and
	// queries.
	maxRequest = 1 << 20
	maxFrames  = 64
	maxCommand = 64 << 10
	// idleBuffer is the size of a connection's buffer for received bytes. If a message made the
	// buffer larger than maxIdle, it is replaced when it is empty.
	idleBuffer = 64 << 10
	maxIdle    = 1 << 20
	// handshakeTime is how long a peer may take for its part of the handshake.
	handshakeTime = 5 * time.Second
	writeTime     = 10 * time.Second
)

// errProtocol is wrapped by errors about bytes that are not ZMTP, or that this package does not
// support.
var errProtocol = errors.New("protocol error")

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// Conn is a connection to a peer of a fitting role.
type Conn struct {
	nc   net.Conn
	most uint64 // limit of the bytes of a received message

	// The received bytes that were not returned yet are buf[from:to].
	buf      []byte
	from, to int
	frames   [][]byte // reused

	mu sync.Mutex
	// mu guards the field below.
	w *bufio.Writer
}

// NewConn does the handshake over nc, which either side may have dialed. After an error nc is
// closed; otherwise the connection owns it.
func NewConn(nc net.Conn, own Role) (*Conn, error) {
	c := &Conn{nc: nc, buf: make([]byte, idleBuffer), w: bufio.NewWriterSize(nc, 16<<10), most: maxMessage}
	if own == Pub || own == Router {
		c.most = maxRequest
	}
	if err := c.shakeHands(own); err != nil {
		_ = nc.Close() // err is the error to return
		return nil, fmt.Errorf("zmtp: shake hands with %s: %w", nc.RemoteAddr(), err)
	}
	return c, nil
}

// greeting is the first message of each side: signature, version, mechanism, as-server, filler.
func greeting() []byte {
	g := make([]byte, 64)
	g[0], g[8], g[9] = 0xff, 1, 0x7f
	g[10], g[11] = 3, 0
	copy(g[12:32], "NULL")
	return g
}

func (c *Conn) shakeHands(own Role) error {
	if err := c.nc.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return err
	}
	if _, err := c.nc.Write(greeting()); err != nil {
		return err
	}
	if err := c.await(64); err != nil {
		return fmt.Errorf("read greeting: %w", err)
	}
	peer := c.buf[c.from:]
	c.from += 64
	mechanism, _, _ := bytes.Cut(peer[12:32], []byte{0})
	switch {
	case peer[0] != 0xff || peer[9] != 0x7f:
		return fmt.Errorf("%w: it does not speak ZMTP", errProtocol)
	case peer[10] < 3:
		return fmt.Errorf("%w: it speaks ZMTP %d, want 3", errProtocol, peer[10])
	case string(mechanism) != "NULL":
		return fmt.Errorf("%w: it wants security mechanism %q, want NULL", errProtocol, mechanism)
	}
	ready := []byte("\x05READY")
	for _, p := range [][2]string{{"Socket-Type", string(own)}, {"Identity", ""}} {
		ready = append(append(ready, byte(len(p[0]))), p[0]...)
		ready = append(binary.BigEndian.AppendUint32(ready, uint32(len(p[1]))), p[1]...)
	}
	if err := c.write(flagCommand, ready); err != nil {
		return err
	}
	flags, begin, end, err := c.frame(0, maxCommand)
	if err != nil {
		return fmt.Errorf("read READY: %w", err)
	}
	if flags&flagCommand == 0 {
		return fmt.Errorf("%w: no READY", errProtocol)
	}
	role, err := readReady(c.buf[c.from+begin : c.from+end])
	c.from += end
	if err != nil {
		return err
	}
	if !own.fits(role) {
		return fmt.Errorf("%w: it is a socket of type %q, which does not fit %s", errProtocol, role[:min(len(role), 32)], own)
	}
	return c.nc.SetDeadline(time.Time{})
}

// readReady returns the peer's role.
func readReady(body []byte) (role string, err error) {
	name, rest, ok := cutShort(body)
	switch {
	case ok && string(name) == "ERROR":
		reason, _, _ := cutShort(rest)
		return "", fmt.Errorf("%w: it refuses us: %q", errProtocol, reason)
	case !ok || string(name) != "READY":
		return "", fmt.Errorf("%w: no READY", errProtocol)
	}
	for len(rest) > 0 {
		var key []byte
		if key, rest, ok = cutShort(rest); !ok || len(rest) < 4 {
			return "", fmt.Errorf("%w: READY is cut short", errProtocol)
		}
		size := binary.BigEndian.Uint32(rest)
		if rest = rest[4:]; uint64(size) > uint64(len(rest)) {
			return "", fmt.Errorf("%w: READY is cut short", errProtocol)
		}
		if bytes.EqualFold(key, []byte("Socket-Type")) {
			role = string(rest[:size])
		}
		rest = rest[size:]
	}
	return role, nil
}

// cutShort splits off a string that is preceded by its length in one byte.
func cutShort(b []byte) (s, rest []byte, ok bool) {
	if len(b) == 0 || int(b[0]) > len(b)-1 {
		return nil, nil, false
	}
	return b[1 : 1+b[0]], b[1+b[0]:], true
}

// frame waits for the frame that begins at bytes after from, and returns its flags and where its body
// begins and ends. room limits the body.
func (c *Conn) frame(at int, room uint64) (flags byte, begin, end int, err error) {
	if err = c.await(at + 2); err == nil && c.buf[c.from+at]&flagLong != 0 {
		err = c.await(at + 9)
	}
	if err != nil {
		return 0, 0, 0, err
	}
	head := c.buf[c.from+at:]
	flags, size, begin := head[0], uint64(head[1]), at+2
	if flags&flagLong != 0 {
		size, begin = binary.BigEndian.Uint64(head[1:]), at+9
	}
	switch {
	case flags&^(flagMore|flagLong|flagCommand) != 0:
		err = fmt.Errorf("%w: a frame with flags %#02x", errProtocol, flags)
	case flags&flagCommand != 0 && size > maxCommand:
		err = fmt.Errorf("%w: a command of %d bytes", errProtocol, size)
	case size > room:
		err = fmt.Errorf("%w: a message of more than %d bytes", errProtocol, c.most)
	default:
		end = begin + int(size)
		err = c.await(end)
	}
	return flags, begin, end, err
}

// await waits until there are n bytes after from. The buffer grows only as bytes arrive, because
// the announced size may be false.
func (c *Conn) await(n int) error {
	for c.to-c.from < n {
		if c.from > 0 && c.from+n > len(c.buf) {
			c.to = copy(c.buf, c.buf[c.from:c.to])
			c.from = 0
		}
		if c.to == len(c.buf) {
			c.buf = append(c.buf, make([]byte, min(n, 2*c.to)-c.to)...)
		}
		read, err := c.nc.Read(c.buf[c.to:])
		if c.to += read; err != nil && c.to-c.from < n {
			if errors.Is(err, io.EOF) && c.to > c.from {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

// Read waits for the next message and returns its frames, which are valid until the next Read.
// After an error the connection is unusable. A subscription, in either form of the protocol, is a
// message of one frame: 1 or 0 (to unsubscribe), then the prefix of the topics.
func (c *Conn) Read() ([][]byte, error) {
	if c.from == c.to && len(c.buf) > maxIdle {
		c.buf, c.from, c.to = make([]byte, idleBuffer), 0, 0
	}
	var spans [maxFrames][2]int // where the frames begin and end, after from
	for at, n, room := 0, 0, c.most; ; {
		flags, begin, end, err := c.frame(at, room)
		if err == nil && flags&flagCommand == 0 && n >= maxFrames {
			err = fmt.Errorf("%w: a message of more than %d frames", errProtocol, maxFrames)
		}
		if err != nil {
			return nil, fmt.Errorf("zmtp: read: %w", err)
		}
		at = end
		room -= uint64(end - begin) // also of commands inside a message, which stay in the buffer
		if flags&flagCommand != 0 {
			message, err := c.command(c.buf[c.from+begin : c.from+end])
			if err != nil {
				return nil, fmt.Errorf("zmtp: read: %w", err)
			}
			if n == 0 {
				c.from, at, room = c.from+end, 0, c.most
				if message != nil {
					return [][]byte{message}, nil
				}
			}
			continue
		}
		spans[n] = [2]int{begin, end}
		if n++; flags&flagMore == 0 {
			c.frames = c.frames[:0]
			for _, s := range spans[:n] {
				c.frames = append(c.frames, c.buf[c.from+s[0]:c.from+s[1]:c.from+s[1]])
			}
			c.from += at
			return c.frames, nil
		}
	}
}

// command answers a command, or converts it into the equivalent message.
func (c *Conn) command(body []byte) (message []byte, err error) {
	name, rest, ok := cutShort(body)
	if !ok {
		return nil, fmt.Errorf("%w: a command without name", errProtocol)
	}
	switch string(name) {
	case "SUBSCRIBE":
		return append([]byte{1}, rest...), nil
	case "CANCEL":
		return append([]byte{0}, rest...), nil
	case "PING":
		if len(rest) < 2 {
			return nil, fmt.Errorf("%w: PING is cut short", errProtocol)
		}
		return nil, c.write(flagCommand, append([]byte("\x04PONG"), rest[2:]...))
	default:
		return nil, nil
	}
}

// Write sends a message. While the peer does not read, it waits up to ten seconds.
func (c *Conn) Write(frames ...[]byte) error {
	if err := c.nc.SetWriteDeadline(time.Now().Add(writeTime)); err != nil {
		return fmt.Errorf("zmtp: write: %w", err)
	}
	if err := c.write(flagMore, frames...); err != nil {
		return fmt.Errorf("zmtp: write: %w", err)
	}
	return nil
}

// Subscribe subscribes to the topics that begin with prefix.
func (c *Conn) Subscribe(prefix string) error {
	return c.Write(append([]byte{1}, prefix...))
}

// write writes the frames of a message or of a command. The writer keeps its first error.
func (c *Conn) write(flags byte, frames ...[]byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, f := range frames {
		if i == len(frames)-1 {
			flags &^= flagMore
		}
		if len(f) <= 255 {
			_, _ = c.w.Write([]byte{flags, byte(len(f))})
		} else {
			_, _ = c.w.Write(binary.BigEndian.AppendUint64([]byte{flags | flagLong}, uint64(len(f))))
		}
		_, _ = c.w.Write(f)
	}
	return c.w.Flush()
}

// Close ends the connection, and reads and writes that wait on it.
func (c *Conn) Close() error { return c.nc.Close() }
