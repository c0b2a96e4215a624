// SPDX-License-Identifier: Apache-2.0

package bench

import "time"

// Planned is what tests look at of a planned request.
type Planned struct {
	At           time.Duration
	Conversation int
	Turn         int
	Body         string
}

// Plan returns the plan of a load.
func Plan(c LoadConfig) ([]Planned, error) {
	if err := Complete(&c); err != nil {
		return nil, err
	}
	var out []Planned
	for _, p := range plan(c) {
		body, err := p.body(&c)
		if err != nil {
			return nil, err
		}
		out = append(out, Planned{p.at, p.conversation, p.turn, string(body)})
	}
	return out, nil
}
