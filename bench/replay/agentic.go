// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"
)

// Conversations are recorded conversations of coding agents. Deal makes a workload
// of them.
type Conversations struct {
	Name string
	list []conversation
}

type conversation struct {
	blockSize int
	turns     []turn // those of nested agents in their places
	agents    int32  // nested agents
}

// turn is one request of a conversation.
type turn struct {
	input, output int
	api, think    float64 // s: of the recorded response, and before the request
	keep          int     // blocks kept of the chain before it
	runs          []run   // blocks appended
	chain         int32   // chain that it belongs to: 0, or that of a nested agent
}

type run struct{ first, length int }

// sessionLine is a line of the file, and a nested agent in it.
type sessionLine struct {
	Type      string        `json:"type"`
	BlockSize int           `json:"block_size"`
	In        int           `json:"in"`
	Out       int           `json:"out"`
	API       float64       `json:"api_time"`
	Think     float64       `json:"think_time"`
	Keep      int           `json:"p"`
	Runs      [][2]int      `json:"h"`
	Requests  []sessionLine `json:"requests"`
}

// readConversations reads recorded conversations, a JSON object a line: block_size,
// and requests with in, out (tokens), api_time, think_time (s), p (blocks kept of
// the request before), h (runs [first, length] of blocks appended). An entry with
// requests of its own is a nested agent: its requests come in its place and begin
// with an empty prompt; the chain goes on after them. An error names the line.
func readConversations(name string, r io.Reader) (*Conversations, error) {
	c := &Conversations{Name: name}
	err := readLines(name, r, func(l *sessionLine) error {
		if l.BlockSize < 1 || l.BlockSize > MooncakeBlock || MooncakeBlock%l.BlockSize != 0 {
			return fmt.Errorf("block_size is %d, want a divisor of %d", l.BlockSize, MooncakeBlock)
		}
		c.list = append(c.list, conversation{blockSize: l.BlockSize})
		return c.list[len(c.list)-1].add(l.Requests, 0)
	})
	return c, err
}

// LoadConversations reads a file of recorded conversations.
func LoadConversations(name string) (*Conversations, error) {
	return readFile(name, func(r io.Reader) (*Conversations, error) { return readConversations("agentic", r) })
}

func (c *conversation) add(requests []sessionLine, chain int32) error {
	length := 0 // of the chain
	for i := range requests {
		r := &requests[i]
		if r.Requests != nil {
			if chain > 0 {
				return errors.New("a nested agent has nested agents")
			}
			c.agents++
			if err := c.add(r.Requests, c.agents); err != nil {
				return err
			}
			continue
		}
		t := turn{input: r.In, output: max(1, r.Out), api: r.API, think: r.Think, keep: r.Keep, chain: chain}
		if r.Keep < 0 || r.Keep > length {
			return fmt.Errorf("request %d keeps %d blocks of %d", i, r.Keep, length)
		}
		length = r.Keep
		for _, h := range r.Runs {
			if h[0] < 0 || h[1] < 0 || h[1] > maxTokens {
				return fmt.Errorf("request %d has the blocks %v", i, h)
			}
			t.runs = append(t.runs, run{h[0], h[1]})
			length += h[1]
		}
		if r.In < 1 || r.In > maxTokens || length != r.In/c.blockSize || r.Out < 0 || r.Out > maxTokens {
			return fmt.Errorf("request %d has %d blocks for %d tokens, and %d tokens of output", i, length, r.In, r.Out)
		}
		c.turns = append(c.turns, t)
	}
	return nil
}

// unroll calls yield with each turn and the ids of its blocks, which it must not
// keep.
func (c *conversation) unroll(yield func(t *turn, ids []int)) {
	chains := map[int32][]int{}
	for i := range c.turns {
		t := &c.turns[i]
		ids := chains[t.chain][:t.keep]
		for _, r := range t.runs {
			for n := range r.length {
				ids = append(ids, r.first+n)
			}
		}
		chains[t.chain] = ids
		yield(t, ids)
	}
}

// DealConfig says how conversations become the workload of users.
type DealConfig struct {
	Users    int
	Requests int // at least; whole conversations
	Seed     uint64
}

// The bounds of a dealt workload, which a cluster of the presets can serve.
const (
	dealtTurns     = 150     // first requests of each conversation
	dealtInput     = 200_000 // tokens of a prompt
	thinkMost      = 60 * time.Second
	pauseBetween   = 5 * time.Second // between conversations
	usersStartOver = 30 * time.Second
)

// Deal makes a closed loop: conversations in an order by the seed, each dealt to
// the user with the fewest requests so far, until there are enough of them. Users
// begin uniformly within 30 s. The next request comes after the response and the
// recorded think time, at most 60 s, the next conversation after 5 s. Of a
// conversation the first 150 requests count; one with a prompt of more than 200,000
// tokens among them is left out. Blocks are put together to 512 tokens; what is left
// over is not shared.
func (c *Conversations) Deal(d DealConfig) (*Trace, error) {
	if d.Users < 1 || d.Users > 1<<16 || d.Requests < 1 || d.Requests > maxRequests {
		return nil, fmt.Errorf("replay: %d users and %d requests, want at least one of each", d.Users, d.Requests)
	}
	rng := rand.New(rand.NewPCG(d.Seed, 0x6465616c))
	t := &Trace{Name: fmt.Sprintf("%s, %d users", c.Name, d.Users), BlockSize: MooncakeBlock, Users: make([]User, d.Users)}
	for i := range t.Users {
		t.Users[i].Start = time.Duration(rng.Float64() * float64(usersStartOver))
	}
	for _, n := range rng.Perm(len(c.list)) {
		if len(t.Requests) >= d.Requests {
			break
		}
		if c.list[n].tooLong() {
			continue
		}
		user := &t.Users[0]
		for i := range t.Users {
			if len(t.Users[i].Requests) < len(user.Requests) {
				user = &t.Users[i]
			}
		}
		first := len(t.Requests)
		t.add(n, &c.list[n])
		for i := first; i < len(t.Requests); i++ {
			if i == first {
				t.Requests[i].Think = pauseBetween
			}
			user.Requests = append(user.Requests, int32(i))
		}
	}
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("replay: %s: each conversation has a prompt of more than %d tokens", c.Name, dealtInput)
	}
	return t, nil
}

// tooLong says whether a request that counts has a prompt above the bound.
func (c *conversation) tooLong() bool {
	return slices.ContainsFunc(c.turns[:min(dealtTurns, len(c.turns))], func(t turn) bool { return t.input > dealtInput })
}

// add appends the requests of a conversation.
func (t *Trace) add(number int, c *conversation) {
	group := t.BlockSize / c.blockSize
	left := dealtTurns
	c.unroll(func(u *turn, ids []int) {
		if left--; left < 0 {
			return
		}
		r := Request{
			Think:   min(seconds(u.think), thinkMost),
			Session: uint64(number) + 1, Input: u.input, Output: u.output,
			Blocks: make([]int32, 0, len(ids)/group),
		}
		parent := none
		for g := range len(ids) / group {
			// Ids of one conversation name their prefix, so the last one of a
			// group stands for all of it.
			parent = t.blocks.number(parent, uint64(number)<<32|uint64(ids[g*group+group-1]))
			r.Blocks = append(r.Blocks, parent)
		}
		t.Requests = append(t.Requests, r)
	})
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
