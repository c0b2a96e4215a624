// SPDX-License-Identifier: Apache-2.0

package dynamo

import (
	"context"
	"errors"
	"io"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// PlaneRequest is a request of Dynamo's request plane.
func PlaneRequest(path, id, subject, address string, q events.Query) ([]byte, error) {
	return (&exchange{id: id, subject: subject, address: address}).request(path, q)
}

// AskIndexer sends a query over the request plane.
func AskIndexer(ctx context.Context, at Indexer, q events.Query) (a events.Answer, publisher uint64, err error) {
	done := false
	var bad error
	err = askIndexer(ctx, at, q, func(p events.AnswerPart) bool {
		a, bad = events.DecodeAnswer(p.Data)
		publisher, done = p.Publisher, true
		return false
	})
	if err = errors.Join(err, bad); err == nil && !done {
		err = msgpack.ErrShape
	}
	return a, publisher, err
}

// SplitFrames decodes a ZMQ message of the event plane.
func SplitFrames(frames [][]byte) (topic string, body []byte, err error) { return splitFrames(frames) }

// AppendTwoPart appends a message of the request plane.
func AppendTwoPart(dst, header, body []byte) []byte { return appendTwoPart(dst, header, body) }

// Nobody reports whether an error means that no process answers.
func Nobody(err error) bool { return errors.Is(err, events.ErrNobody) }

// ReadPlaneAnswer reads the part of an answer after its subject.
func ReadPlaneAnswer(r io.Reader) {
	x := exchange{part: func(p events.AnswerPart) bool {
		_, _ = events.DecodeAnswer(p.Data)
		return true
	}}
	_ = x.readAnswer(r)
}
