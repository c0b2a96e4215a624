// SPDX-License-Identifier: Apache-2.0

package dynamo

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// Indexer is the local indexer of a Dynamo worker's rank: an endpoint of Dynamo's request
// plane over TCP. docs/protocol.md describes the messages.
type Indexer struct {
	Transport string // host:port/path, as the worker's record has it
	Publisher uint64 // the publisher whose event ids are in the answers; 0 if unknown
}

// Limits of the request plane.
const (
	ackTime    = 5 * time.Second  // to acknowledge a request, and then to begin the answer
	answerTime = 30 * time.Second // for the whole answer
	// maxPlaneHeader limits an acknowledgement and the headers of messages, which have about 100
	// bytes.
	maxPlaneHeader = 64 << 10
	// maxDials limits the connections of other peers while an answer is expected.
	maxDials = 16
)

// exchange is one request and its answer.
type exchange struct {
	at      Indexer
	part    func(events.AnswerPart) (more bool) // takes the parts of the answer
	id      string                              // of the request
	subject string                              // random; the answer begins with it
	address string                              // where the worker connects to answer
}

// newID returns a random id in the form of a UUID.
func newID() string {
	a, b := rand.Uint64(), rand.Uint64()
	return fmt.Sprintf("%08x-%04x-4%03x-%04x-%012x", uint32(a>>32), uint16(a>>16), uint16(a)&0xfff,
		uint16(b>>48)&0x3fff|0x8000, b&(1<<48-1))
}

// askIndexer sends a query to a local indexer and hands the answer to part. The worker
// answers over a connection of its own, so each query opens a listener at the local address
// of the connection to the worker.
func askIndexer(ctx context.Context, at Indexer, q events.Query, part func(events.AnswerPart) (more bool)) error {
	x := exchange{at: at, part: part, id: newID(), subject: newID()}
	err := x.ask(ctx, q)
	if errors.Is(err, syscall.ECONNREFUSED) {
		err = fmt.Errorf("%w: %w", events.ErrNobody, err)
	}
	if err != nil {
		return fmt.Errorf("dynamo: ask the indexer at %.128q: %w", at.Transport, err)
	}
	return nil
}

func (x *exchange) ask(ctx context.Context, q events.Query) error {
	address, path, ok := strings.Cut(x.at.Transport, "/")
	if !ok || path == "" {
		return errors.New("want host:port/path")
	}
	conn, err := (&net.Dialer{Timeout: ackTime}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	own, _, err := net.SplitHostPort(conn.LocalAddr().String())
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(own, "0"))
	if err != nil {
		return fmt.Errorf("listen for the answer: %w", err)
	}
	defer listener.Close()
	stop := context.AfterFunc(ctx, func() {
		_ = conn.Close() // reading then ends
		_ = listener.Close()
	})
	defer stop()

	x.address = listener.Addr().String()
	request, err := x.request(path, q)
	if err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Now().Add(ackTime)); err != nil {
		return err
	}
	if _, err := conn.Write(request); err != nil {
		return err
	}
	if err := readAck(conn); err != nil {
		return fmt.Errorf("read the acknowledgement: %w", err)
	}
	return x.await(ctx, listener)
}

// request returns the request: the path, headers as JSON, and a message whose body is the
// query.
func (x *exchange) request(path string, q events.Query) ([]byte, error) {
	headers, err := json.Marshal(struct {
		RequestID string `json:"request-id"`
		Path      string `json:"x-endpoint-path"`
	}{x.id, path})
	if err != nil {
		return nil, err
	}
	if len(path) > math.MaxUint16 || len(headers) > math.MaxUint16 {
		return nil, fmt.Errorf("the path has %d bytes", len(path))
	}
	// Ids and addresses need no escapes.
	info := fmt.Sprintf(`{"address":%q,"subject":%q,"context":%q,"stream_type":"response"}`, x.address, x.subject, x.id)
	control := fmt.Appendf(nil, `{"id":%q,"request_type":"single_in","response_type":"many_out","payload_codec":"msgpack","connection_info":{"transport":"tcp_server","info":%q}}`, x.id, info)
	body := events.AppendQuery(nil, q)
	dst := append(binary.BigEndian.AppendUint16(nil, uint16(len(path))), path...)
	dst = append(binary.BigEndian.AppendUint16(dst, uint16(len(headers))), headers...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(24+len(control)+len(body)))
	return appendTwoPart(dst, control, body), nil
}

// appendTwoPart appends a message of header and body: their lengths, a checksum that is
// always 0, and both.
func appendTwoPart(dst, header, body []byte) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(len(header)))
	dst = binary.BigEndian.AppendUint64(dst, uint64(len(body)))
	dst = binary.BigEndian.AppendUint64(dst, 0)
	return append(append(dst, header...), body...)
}

// readTwoPart reads a message of header and body.
func readTwoPart(r io.Reader, maxBody int) (header, body []byte, err error) {
	var head [24]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, nil, err
	}
	h, b := binary.BigEndian.Uint64(head[:]), binary.BigEndian.Uint64(head[8:])
	if h > maxPlaneHeader || b > uint64(maxBody) {
		return nil, nil, fmt.Errorf("%w: a message with a header of %d bytes and a body of %d", msgpack.ErrShape, h, b)
	}
	if header, err = readBytes(r, int(h)); err == nil {
		body, err = readBytes(r, int(b))
	}
	return header, body, err
}

// readBytes reads n bytes. It reserves memory for them only as they come.
func readBytes(r io.Reader, n int) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err == nil && len(data) < n {
		err = io.ErrUnexpectedEOF
	}
	return data, err
}

// readAck reads an acknowledgement: a length and as many bytes, which are ignored.
func readAck(r io.Reader) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxPlaneHeader {
		return fmt.Errorf("%w: it has %d bytes", msgpack.ErrShape, n)
	}
	_, err := io.CopyN(io.Discard, r, int64(n))
	return err
}

// await accepts connections until one brings the answer.
func (x *exchange) await(ctx context.Context, l net.Listener) error {
	timeout := time.AfterFunc(ackTime, func() { _ = l.Close() }) // Accept then ends
	defer timeout.Stop()
	for range maxDials {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("wait for the answer: %w", err)
		}
		ours, err := x.answer(ctx, conn)
		_ = conn.Close() // the answer has been read
		if ours {
			return err
		}
	}
	return fmt.Errorf("wait for the answer: %d other connections", maxDials)
}

// answer reads the answer from a connection. ours is false if another peer connected.
func (x *exchange) answer(ctx context.Context, conn net.Conn) (ours bool, err error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // reading then ends
	defer stop()
	if err := conn.SetDeadline(time.Now().Add(ackTime)); err != nil {
		return false, err
	}
	r := bufio.NewReader(conn)
	header, _, err := readTwoPart(r, maxPlaneHeader)
	var hello struct{ Subject string }
	if err != nil || json.Unmarshal(header, &hello) != nil || hello.Subject != x.subject {
		return false, err
	}
	if err := conn.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return true, err
	}
	if err := x.readAnswer(r); err != nil {
		return true, fmt.Errorf("read the answer: %w", err)
	}
	return true, nil
}

// readAnswer reads what follows the subject: an empty error, the answer, and its end.
func (x *exchange) readAnswer(r io.Reader) error {
	header, _, err := readTwoPart(r, maxPlaneHeader)
	if err != nil {
		return err
	}
	var prologue struct{ Error *string }
	if err := json.Unmarshal(header, &prologue); err != nil {
		return err
	}
	if prologue.Error != nil {
		return fmt.Errorf("the request is refused: %.256s", *prologue.Error)
	}
	for {
		header, body, err := readTwoPart(r, events.MaxAnswerBytes)
		if err != nil {
			return err
		}
		if len(header) > 0 {
			return fmt.Errorf("it ends without one: %.64q", header)
		}
		var data []byte // empty in the last message
		if _, err := msgpack.ReadFields(body, []msgpack.Field{{Key: "data", Value: func(value []byte) (rest []byte, err error) {
			data, rest, err = msgpack.Cut(value)
			return rest, err
		}}}); err != nil {
			return err
		}
		if len(data) > 0 && !x.part(events.AnswerPart{Count: 1, Publisher: x.at.Publisher, Data: data}) {
			return nil
		}
	}
}
