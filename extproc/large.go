// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"time"
)

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

// takeTurn waits until few other large bodies are being read, hashed and tokenized: many at once would keep kvroute from
// answering Envoy in time, for other requests too. It returns false if the wait is too long.
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
