// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/dlclark/regexp2"
)

// regex is an expression that has no scanner. A backtracking engine runs it. Any number of goroutines
// may use it at once.
type regex struct {
	expr  string // as it stands in the file
	known string // in the engine's words

	free freeList[*regexp2.Regexp] // an engine has one time limit for all who use it; so each text has its own
}

// plainer has an expression without a class within a class, which translate refuses, for that of BLOOM's files.
//
//nolint:gochecknoglobals // a table
var plainer = map[string]string{` ?[^(\s|[.,!?…。，、।۔،])]+`: ` ?[^(\s|.,!?…。，、।۔،)]+`}

func compile(expr string) (*regex, error) {
	if len(expr) > 16<<10 {
		return nil, fmt.Errorf("expression of %d bytes, more than 16 KiB", len(expr))
	}
	known, err := translate(cmp.Or(plainer[expr], expr))
	if err != nil {
		return nil, fmt.Errorf("expression %q: %w", expr, err)
	}
	r := &regex{expr: expr, known: known}
	re, err := r.take()
	if err != nil {
		return nil, err
	}
	r.free.give(re)
	return r, nil
}

func (r *regex) take() (*regexp2.Regexp, error) {
	if re, ok := r.free.take(); ok {
		return re, nil
	}
	re, err := regexp2.Compile(r.known, regexp2.None)
	if err != nil {
		return nil, fmt.Errorf("expression %q: %w", r.expr, err)
	}
	return re, nil
}

// matches appends the spans of text that the expression matches, in bytes.
func (r *regex) matches(b *budget, dst []span, text []byte) ([]span, error) {
	re, err := r.take()
	if err != nil {
		return dst, err
	}
	defer r.free.give(re)
	var m *regexp2.Match
	if re.MatchTimeout, err = b.remaining(); err == nil {
		m, err = re.FindRunesMatch([]rune(string(text)))
	}
	at, bytes := 0, 0 // the same place in runes and in bytes
	to := func(index int) uint32 {
		for ; at < index; at++ {
			_, n := utf8.DecodeRune(text[bytes:])
			bytes += n
		}
		return uint32(bytes)
	}
	for m != nil && err == nil {
		start := to(m.Index)
		dst = append(dst, span{start, to(m.Index + m.Length)})
		if re.MatchTimeout, err = b.remaining(); err == nil {
			m, err = re.FindNextMatch(m)
		}
	}
	if err != nil {
		return dst, fmt.Errorf("tokenizer: match %q: %w", r.expr, cmp.Or(b.late(), err))
	}
	return dst, nil
}

// span is a stretch of a text, in bytes.
type span struct{ start, end uint32 }

// checkEvery is the number of bytes that are encoded between two checks of the context.
const checkEvery = 64 << 10

// budget limits the time for encoding one text. The zero budget limits only expressions.
type budget struct {
	ctx  context.Context //nolint:containedctx // a budget is of one call
	size int             // of the text
	left int             // what may be done before the next look at the context
	end  time.Time       // of all searches of expressions; zero before the first
	err  error           // the context's, once seen
}

// spend reports whether encoding must stop. n is the work done since the last call, in bytes or steps
// of similar cost. After it has returned true it always does.
func (b *budget) spend(n int) bool {
	if b.left -= n; b.left > 0 {
		return false
	}
	if b.late() == nil {
		b.left = checkEvery
	}
	return b.err != nil
}

func (b *budget) late() error {
	if b.ctx != nil && b.err == nil {
		b.err = b.ctx.Err()
	}
	return b.err
}

// regexTime plus ten microseconds a byte is the limit for all searches in one text, in wall-clock
// time: a backtracking engine can need exponential time for the expression of a file. Ordinary texts
// take a tenth of it on an idle machine.
//
//nolint:gochecknoglobals // changed by tests
var regexTime = 2 * time.Second

// remaining is the time that the next search may take.
func (b *budget) remaining() (time.Duration, error) {
	if err := b.late(); err != nil {
		return 0, err
	}
	now := time.Now()
	if b.end.IsZero() {
		b.end = now.Add(regexTime + time.Duration(min(b.size, math.MaxInt32))*10*time.Microsecond)
	}
	end, err := b.end, errSlow
	if b.ctx != nil {
		if d, ok := b.ctx.Deadline(); ok && d.Before(end) {
			end, err = d, context.DeadlineExceeded
		}
	}
	if d := end.Sub(now); d > 0 {
		return d, nil
	}
	return 0, err
}

var errSlow = errors.New("the expression takes too long")

// errGrown reports that normalization makes a text too large: few steps of a hostile file make
// gigabytes of few bytes.
var errGrown = errors.New("the file's rewriting makes too large a text")

// A rewritten text may have grows times its original size, or grows times leastRoom. ▁ has three times
// the size of the space that it replaces.
const (
	grows     = 4
	leastRoom = 1 << 20
)

// quickBytes is the number of bytes that are copied in the time in which one byte is encoded.
const quickBytes = 16

// rewriteStep is the number of bytes that are rewritten between two checks of the time.
const rewriteStep = 16 << 10

// freeList keeps scratch values for later texts, at most as many as can be in use at once. A sync.Pool
// would lose the known words after two garbage collections.
type freeList[T any] struct {
	mu  sync.Mutex
	all []T
}

func (f *freeList[T]) take() (x T, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.all) - 1
	if n < 0 {
		return x, false
	}
	x, f.all = f.all[n], f.all[:n]
	return x, true
}

func (f *freeList[T]) give(x T) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.all) < runtime.GOMAXPROCS(0) {
		f.all = append(f.all, x)
	}
}
