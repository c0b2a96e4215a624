// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"io"
)

// PlaneRequest is a request of Dynamo's request plane.
func PlaneRequest(path, id, subject, address string, at Indexer, q Query) ([]byte, error) {
	return appendPlaneRequest(nil, path, exchange{id: id, subject: subject, address: address}, at, q)
}

// AskIndexer puts a query over the request plane.
func AskIndexer(ctx context.Context, at Indexer, q Query) (a Answer, publisher uint64, err error) {
	c := collected{query: q}
	done := false
	err = askIndexer(ctx, at, q, func(p AnswerPart) bool {
		done, err = c.add(p)
		return err == nil && !done
	})
	if err == nil && !done {
		err = errShape
	}
	return c.answer, c.publisher, err
}

// AppendTwoPart appends a message of the request plane.
func AppendTwoPart(dst, header, body []byte) []byte { return appendTwoPart(dst, header, body) }

// Nobody reports whether an error means that nobody answers.
func Nobody(err error) bool { return errors.Is(err, errNobody) }

// ReadPlaneAnswer reads what follows an answer's subject.
func ReadPlaneAnswer(r io.Reader) {
	_ = readAnswer(r, Indexer{}, func(p AnswerPart) bool {
		_, _ = DecodeAnswer(p.Data)
		return true
	})
}
