// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/durationpb"
)

// receiveBeside receives the next message beside a decision that takes long, so that the end of the
// stream ends ctx. Envoy ends some streams in a way that only a receiver notices.
func (s *stream) receiveBeside() {
	if s.messages != nil {
		return
	}
	in := make(chan *extprocv3.ProcessingRequest, 1)
	s.messages = in
	go func() {
		m, err := s.grpc.Recv()
		if err != nil {
			s.wait.end()
		}
		in <- m
	}()
}

// await waits for the next message, which a second goroutine receives. The deadline of the stream, a drain or
// an eviction may end the wait before.
func (s *stream) await() (*extprocv3.ProcessingRequest, waitEnd) {
	s.receiveBeside()
	select {
	case m := <-s.messages:
		if s.messages = nil; m == nil {
			return nil, streamEnded
		}
		return m, received
	case <-s.deadline:
		s.deadline = nil
		return nil, deadlinePassed
	case <-s.wait.woken:
		return nil, outdated // unless the wake-up was meant for this wait: receive then takes the cause from waits.remove
	}
}

// passDeadline handles the end of the wait for s.deadline. It returns false if the stream must end.
func (s *stream) passDeadline() bool {
	switch s.state {
	case gathering:
		return s.passChunks(failBudget)
	case waiting:
		s.moreTime()
		s.deadline = s.nextReminder()
	default: // Envoy does not wait: a refusal or a response came first
	}
	return true
}

// nextReminder ends the time between two calls of moreTime, which is less than half of Envoy's message_timeout.
func (s *stream) nextReminder() <-chan time.Time { return time.After(s.conf.DecisionTimeout / 2) }

// moreTime asks for the longest time to receive and to check the body. Envoy's time begins when it begins to send the
// body, and at its end Envoy sends the unchecked body to a worker. Envoy ignores such a request before that begin, and
// each one after the first of a message, so later ones may be sent again.
func (s *stream) moreTime() {
	s.receiveBeside()
	s.sendTimeout(s.conf.MaxMessageTimeout)
}

// takeTurn waits until few other large bodies are being read, hashed and tokenized: many at once would keep kvroute
// from answering Envoy in time, for other requests too. It returns false if the wait is too long.
func (s *stream) takeTurn(ctx context.Context) bool {
	s.moreTime()
	select {
	case s.turns <- struct{}{}:
		s.hasTurn = true
	case <-ctx.Done():
	case <-time.After(s.conf.MaxMessageTimeout / 2):
	}
	return s.hasTurn
}

// answerTime is added to QueueWait in Envoy's timeout, so that kvroute refuses the request before
// Envoy continues without an answer.
const answerTime = 500 * time.Millisecond

// extend gives kvroute more time to answer Envoy's message. Envoy takes only one extension for a
// message.
func (s *stream) extend(d time.Duration) {
	s.extended = true
	s.receiveBeside()
	s.sendTimeout(min(d+answerTime, s.conf.MaxMessageTimeout))
}

// sendTimeout asks Envoy to wait for the answer to its message for d from now. An error means that the stream has
// ended, which ends ctx.
func (s *stream) sendTimeout(d time.Duration) {
	_ = s.grpc.Send(&extprocv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(d)})
}

// evict ends the longest wait of a stream without a decision, of one that can still answer if there is any.
func (l *waits) evict() { l.stop(evicted, 1, &l.undecided, &l.small) }

// drain ends all waits, and keeps new ones from beginning.
func (l *waits) drain() {
	l.mu.Lock()
	l.draining = true
	l.mu.Unlock()
	l.stop(drained, -1, &l.undecided, &l.small, &l.others)
}

// stop ends the first n waits of the rings, or all if n is negative.
func (l *waits) stop(why waitEnd, n int, heads ...*wait) {
	var stopped []*wait
	l.mu.Lock()
	for _, head := range heads {
		for n != 0 && head.next != nil && head.next != head {
			w := head.next
			w.unlink()
			w.by = why
			stopped = append(stopped, w)
			n--
		}
	}
	l.mu.Unlock()
	for _, w := range stopped {
		if w.woken == nil {
			w.end()
			continue
		}
		select {
		case w.woken <- struct{}{}:
		default: // it was woken before
		}
	}
}
