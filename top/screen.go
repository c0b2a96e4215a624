// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"sync"

	tea "charm.land/bubbletea/v2"
)

// Show shows a picture in the terminal at in and out until the user quits or ctx ends. If the source
// cannot be opened at first, it returns the error without touching the terminal. The environment
// variable NO_COLOR turns colours off.
func Show(ctx context.Context, from Source, in io.Reader, out io.Writer) error {
	return show(ctx, follower{open: from, silence: silence, pause: pause}, tea.WithInput(in), tea.WithOutput(out))
}

// show shows what a follower reads. It sets the functions that the follower calls.
func show(parent context.Context, f follower, options ...tea.ProgramOption) error {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	stream, err := f.open(ctx, true)
	if err != nil {
		return err
	}
	program := tea.NewProgram(&screen{}, append(options, tea.WithContext(ctx), tea.WithoutSignalHandler())...)
	f.changed = func(section []byte) { program.Send(section) }
	f.ended = func(err error) { program.Send(err) }
	var following sync.WaitGroup
	following.Go(func() { f.follow(ctx, stream) })
	_, err = program.Run()
	cancel()
	following.Wait()
	if parent.Err() != nil {
		return parent.Err()
	}
	return err
}

// screen is the content of a terminal and what the keys have set. Its methods run on one goroutine.
type screen struct {
	picture
	width, height int // of the terminal; 0 = not known yet
	by            int // index in orders()
	selected      selection
	offset        int // of the first shown worker
	helping       bool
	problem       string // why there is no news, or ""
}

const (
	bold   = "\x1b[1m"
	red    = "\x1b[31m"
	yellow = "\x1b[33m"
	plain  = "\x1b[m"
)

const help = `up, down, page up, page down   scroll the workers
s        sort the workers by health (the worst first), name, active requests, ...
m        show all models, or the next model or router group
?        show or hide this page
q        quit

requests/s, TTFT and cached are of the last 10 s. TTFT is the time to the first
token, of the newest 2 s with one. cached is the predicted share of the prompts.
saved: cached tokens of the chosen workers, less the mean over all candidates.

active   requests that kvroute sent to the worker and that have not ended
pending  prompt tokens that the worker has yet to compute
cached   blocks in the worker's cache as far as kvroute knows
routed   requests sent to the worker; failed: those that it refused or failed
events   ok, partial, suspect, block_size_mismatch, none, summary, never heard or
         stale: see docs/protocol.md
health   with the words of the lines that begin with !, as in the dashboard
departs  the usage figures of the worker's responses contradict the index`

// Init does nothing.
func (s *screen) Init() tea.Cmd { return nil }

// Update handles a section, the end of the stream, a key or a new size.
func (s *screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		s.width, s.height = msg.Width, msg.Height
	case []byte:
		s.problem = ""
		if err := s.apply(msg); err != nil {
			s.problem = err.Error()
		}
	case error:
		if request, ok := errors.AsType[*url.Error](msg); ok {
			msg = request.Err // without the URL, the line is short enough
		}
		s.problem = "not connected, retrying: " + msg.Error()
	case tea.KeyPressMsg:
		switch msg.String() {
		case "q", "ctrl+c":
			return s, tea.Quit
		case "s":
			s.by, s.offset = (s.by+1)%len(orders()), 0
		case "m":
			s.selected, s.offset = s.next(s.selected), 0
		case "?":
			s.helping = !s.helping
		}
		s.offset += map[string]int{"up": -1, "down": 1, "pgup": -10, "pgdown": 10}[msg.String()]
	}
	return s, nil
}

// View returns the whole screen, in as many lines as the terminal has.
func (s *screen) View() tea.View {
	v := tea.NewView("")
	v.AltScreen = true
	if s.height == 0 {
		return v
	}
	lines, foot := s.paint("", strings.Split(help, "\n")...), s.paint(bold, "? back  q quit")
	if !s.helping {
		shown := s.of(s.selected)
		workers := counted(len(shown.Workers), "worker")
		if s.selected.model != "" {
			workers += " of " + clip(s.selected.String(), maxCell)
		}
		lines, foot = s.tables(shown), s.paint(bold,
			fmt.Sprintf("%s by %s  up/down scroll  s sort  m model  ? help  q quit", workers, orders()[s.by].name))
	}
	if s.problem != "" {
		foot = s.paint(red, s.problem)
	}
	lines = append(lines, make([]string, s.height)...)[:s.height-1]
	v.Content = strings.Join(append(lines, foot...), "\n")
	return v
}

// tables returns a picture with as many workers and decisions as fit. It moves the offset to where
// there are workers. Decisions get a third of the lines, or what the workers leave.
func (s *screen) tables(shown *picture) []string {
	head, decisions := shown.head(), shown.decisionTable(s.width)
	workers, tones := shown.workerTable(s.by, s.width)
	const others = 4 // lines: two titles, an empty one, the footer
	rows := max(0, s.height-len(head)-others)
	forDecisions := min(len(decisions)-1, max(rows/3, rows-(len(workers)-1)))
	forWorkers := min(len(workers)-1, rows-forDecisions)
	s.offset = max(0, min(s.offset, len(workers)-1-forWorkers))
	lines := s.paint(bold, head[0])
	for _, l := range head[1:] {
		style := ""
		if strings.HasPrefix(l, "! ") {
			style = red
		}
		lines = append(lines, s.paint(style, l)...)
	}
	lines = append(lines, s.paint(bold, workers[0])...)
	for i, l := range workers[1+s.offset:][:forWorkers] {
		style := map[tone]string{warn: yellow, bad: red}[tones[1+s.offset+i]]
		lines = append(lines, s.paint(style, l)...)
	}
	return slices.Concat(lines, s.paint("", ""), s.paint(bold, decisions[0]), s.paint("", decisions[1:][:forDecisions]...))
}

// paint returns lines in a style, as wide as the terminal at most.
func (s *screen) paint(style string, lines ...string) (painted []string) {
	for _, l := range lines {
		painted = append(painted, style+clip(l, s.width)+plain)
	}
	return painted
}
