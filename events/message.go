// SPDX-License-Identifier: Apache-2.0

package events

import (
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// ErrMessage is wrapped by errors about bytes that are no message of the event plane.
var ErrMessage = errors.New("not a message of cache events")

// Message is one message of the event plane: an envelope with an array of events.
type Message struct {
	Envelope Envelope // without its payload
	// Events are the readable events. An event of an unknown kind has the zero Kind.
	Events []RouterEvent
	Bad    int // events that cannot be read
}

// DecodeMessage reads a message. The error wraps [ErrMessage].
func DecodeMessage(data []byte) (m Message, err error) {
	if m.Envelope, err = DecodeEnvelope(data); err != nil {
		return Message{}, fmt.Errorf("%w: %w", ErrMessage, err)
	}
	payload := m.Envelope.Payload
	m.Envelope.Payload = nil
	if n, rest, err := msgp.ReadArrayHeaderBytes(payload); err != nil || n > 0 && msgp.NextType(rest) != msgp.MapType {
		topic := m.Envelope.Topic
		return Message{}, fmt.Errorf("%w: a payload of topic %q", ErrMessage, topic[:min(len(topic), 64)])
	}
	if m.Events, m.Bad, err = DecodeEvents(payload); err != nil {
		return Message{}, fmt.Errorf("%w: %w", ErrMessage, err)
	}
	return m, nil
}
