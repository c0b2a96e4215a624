// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// Indexer is where the local indexer of a Dynamo worker's rank is asked: an endpoint of
// Dynamo's request plane over TCP.
type Indexer struct {
	// Transport is host:port/path as the worker's record says: the path is taken
	// verbatim.
	Transport string
	// Publisher is whose event ids the answers count; 0 if that is not known.
	Publisher uint64
}

// Bounds of the request plane.
const (
	// ackTime is how long a worker may take to acknowledge a request, and then to
	// begin with the answer.
	ackTime = 5 * time.Second
	// answerTime bounds the whole answer.
	answerTime = 30 * time.Second
	// maxPlaneHeader bounds the headers of an answer's messages, which are some 100
	// bytes, and an acknowledgement.
	maxPlaneHeader = 64 << 10
	// maxDials bounds the connections that are refused while an answer is waited for:
	// somebody else's.
	maxDials = 16
)

// exchange names one request and its answer.
type exchange struct {
	id      string // of the request
	subject string // of the answer
	address string // that the worker is to dial
}

// newID returns a random id in the form of a UUID.
func newID() string {
	a, b := rand.Uint64(), rand.Uint64()
	return fmt.Sprintf("%08x-%04x-4%03x-%04x-%012x", uint32(a>>32), uint16(a>>16), uint16(a)&0xfff, uint16(b>>48)&0x3fff|0x8000, b&(1<<48-1))
}

// askIndexer puts a query to a local indexer over the request plane, and hands its answer
// to part.
//
// The worker acknowledges the request, dials the address that is in it and answers there,
// in messages of two parts, header and body: first the answer's subject, then that there
// is no error, the answer, and its end. So this opens a listener for each query, at the
// address by which the worker was reached. Whoever dials and does not name the subject, which
// is random, is hung up on.
func askIndexer(ctx context.Context, at Indexer, q events.Query, part func(events.AnswerPart) (more bool)) error {
	address, path, ok := strings.Cut(at.Transport, "/")
	if !ok || path == "" {
		return fmt.Errorf("events: ask an indexer: transport is %.128q, want host:port/path", at.Transport)
	}
	dialer := net.Dialer{Timeout: ackTime}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w: %w", events.ErrNobody, err)
	}
	if err != nil {
		return fmt.Errorf("events: ask an indexer: %w", err)
	}
	defer conn.Close()
	own, _, err := net.SplitHostPort(conn.LocalAddr().String())
	if err != nil {
		return fmt.Errorf("events: ask an indexer: %w", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(own, "0"))
	if err != nil {
		return fmt.Errorf("events: ask an indexer: listen for its answer: %w", err)
	}
	stop := context.AfterFunc(ctx, func() {
		_ = conn.Close() // reading then ends
		_ = listener.Close()
	})
	defer stop()
	defer listener.Close()

	x := exchange{id: newID(), subject: newID(), address: listener.Addr().String()}
	request, err := appendPlaneRequest(nil, path, x, q)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(ackTime)
	if err := conn.SetDeadline(deadline); err != nil {
		return fmt.Errorf("events: ask an indexer: %w", err)
	}
	if _, err := conn.Write(request); err != nil {
		return fmt.Errorf("events: ask an indexer: %w", err)
	}
	if err := readAck(conn); err != nil {
		return fmt.Errorf("events: ask an indexer: read its acknowledgement: %w", err)
	}
	return x.await(ctx, listener, at, part)
}

// appendPlaneRequest appends a request of the request plane to dst: the path, text headers
// as JSON, and a message whose body is the query.
func appendPlaneRequest(dst []byte, path string, x exchange, q events.Query) ([]byte, error) {
	type connection struct {
		Transport string `json:"transport"`
		Info      string `json:"info"`
	}
	info, err := json.Marshal(struct {
		Address    string `json:"address"`
		Subject    string `json:"subject"`
		Context    string `json:"context"`
		StreamType string `json:"stream_type"`
	}{x.address, x.subject, x.id, "response"})
	if err != nil {
		return nil, fmt.Errorf("events: make a request: %w", err)
	}
	body := events.AppendQuery(nil, q)
	control, err := json.Marshal(struct {
		ID           string     `json:"id"`
		RequestType  string     `json:"request_type"`
		ResponseType string     `json:"response_type"`
		Codec        string     `json:"payload_codec"`
		Connection   connection `json:"connection_info"`
	}{x.id, "single_in", "many_out", "msgpack", connection{"tcp_server", string(info)}})
	if err != nil {
		return nil, fmt.Errorf("events: make a request: %w", err)
	}
	headers, err := json.Marshal(struct {
		RequestID string `json:"request-id"`
		Path      string `json:"x-endpoint-path"`
	}{x.id, path})
	if err != nil {
		return nil, fmt.Errorf("events: make a request: %w", err)
	}
	if len(path) > 1<<16-1 || len(headers) > 1<<16-1 {
		return nil, fmt.Errorf("events: make a request: the path has %d bytes", len(path))
	}
	dst = append(binary.BigEndian.AppendUint16(dst, uint16(len(path))), path...)
	dst = append(binary.BigEndian.AppendUint16(dst, uint16(len(headers))), headers...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(24+len(control)+len(body)))
	return appendTwoPart(dst, control, body), nil
}

// appendTwoPart appends a message of header and body: their lengths, a checksum that
// nobody fills in, and both.
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

// readBytes reads n bytes, and takes memory for them as they come.
func readBytes(r io.Reader, n int) ([]byte, error) {
	if n <= maxPlaneHeader {
		data := make([]byte, n)
		_, err := io.ReadFull(r, data)
		return data, err
	}
	data, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err == nil && len(data) < n {
		err = io.ErrUnexpectedEOF
	}
	return data, err
}

// readAck reads that a worker has taken a request: a length and so many bytes, which
// say nothing.
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

// await takes the connection with the answer.
func (x *exchange) await(ctx context.Context, l net.Listener, at Indexer, part func(events.AnswerPart) (more bool)) error {
	if timed, ok := l.(*net.TCPListener); ok {
		if err := timed.SetDeadline(time.Now().Add(ackTime)); err != nil {
			return fmt.Errorf("events: wait for an indexer: %w", err)
		}
	}
	for range maxDials {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("events: wait for an indexer: %w", err)
		}
		ours, err := x.answer(ctx, conn, at, part)
		_ = conn.Close() // all of it has been read
		if ours {
			return err
		}
	}
	return fmt.Errorf("events: wait for an indexer: %d others dialled", maxDials)
}

// answer reads the answer from a connection. It reports whether it is the one that
// was waited for.
func (x *exchange) answer(ctx context.Context, conn net.Conn, at Indexer, part func(events.AnswerPart) (more bool)) (ours bool, err error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // reading then ends
	defer stop()
	if err := conn.SetDeadline(time.Now().Add(ackTime)); err != nil {
		return false, err
	}
	r := bufio.NewReader(conn)
	header, _, err := readTwoPart(r, maxPlaneHeader)
	if err != nil {
		return false, err
	}
	var hello struct{ Subject string }
	if err := json.Unmarshal(header, &hello); err != nil || hello.Subject != x.subject {
		return false, err
	}
	if err := conn.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return true, err
	}
	if err := readAnswer(r, at, part); err != nil {
		return true, fmt.Errorf("events: read an indexer's answer: %w", err)
	}
	return true, nil
}

// readAnswer reads what follows the answer's subject.
func readAnswer(r io.Reader, at Indexer, part func(events.AnswerPart) (more bool)) error {
	header, _, err := readTwoPart(r, maxPlaneHeader)
	if err != nil {
		return err
	}
	var prologue struct{ Error *string }
	if err := json.Unmarshal(header, &prologue); err != nil {
		return err
	}
	if prologue.Error != nil {
		return fmt.Errorf("it is refused: %.256s", *prologue.Error)
	}
	for {
		header, body, err := readTwoPart(r, events.MaxAnswerBytes)
		if err != nil {
			return err
		}
		if len(header) > 0 {
			return fmt.Errorf("it ends without one: %.64q", header)
		}
		data, err := planeData(body)
		if err != nil {
			return err
		}
		if len(data) > 0 && !part(events.AnswerPart{Count: 1, Publisher: at.Publisher, Data: data}) {
			return nil
		}
	}
}

// planeData takes the answer out of the body of a message. It is empty in the last one.
func planeData(body []byte) (data []byte, err error) {
	_, err = msgpack.EachField(body, func(key, value []byte) error {
		if string(key) == "data" {
			data = value
		}
		return nil
	})
	return data, err
}
