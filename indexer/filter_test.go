// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// setBits returns the numbers of the bits that are set.
func setBits(f *indexer.Filter) (set []int) {
	data := f.AppendTo(nil)
	for i := range 8 * len(data) {
		if binary.LittleEndian.Uint64(data[i/64*8:])>>(i%64)&1 != 0 {
			set = append(set, i)
		}
	}
	return set
}

func TestFilterVector(t *testing.T) {
	const h2 = 14643705804678351452 // of tokens 1, 2, 3, 4
	f, err := indexer.ParseFilter(1024, 7, 0, make([]byte, 128))
	if err != nil {
		t.Fatal(err)
	}
	f.Add(h2)
	if got, want := setBits(f), []int{10, 225, 440, 604, 655, 819, 870}; !slices.Equal(got, want) {
		t.Errorf("bits %d, want %d", got, want)
	}
	if !f.Has(h2) || f.Has(h2+1) || f.Count() != 1 {
		t.Errorf("the filter has the hash: %v, and its neighbour: %v; count %d", f.Has(h2), f.Has(h2+1), f.Count())
	}
}

// The bits of a hash equal those of the formula, computed term by term, for filters of
// any size.
func TestFilterBitsAreWhatTheFormulaSays(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 5))
	for range inLong(2000, 200) {
		m, k, h := 64*(1+rng.Uint64N(2000)), 1+rng.Uint64N(16), rng.Uint64()
		f, err := indexer.ParseFilter(m, k, 0, make([]byte, m/8))
		if err != nil {
			t.Fatal(err)
		}
		want := map[int]bool{}
		for i := range k {
			want[int((h&0xffffffff+i*(h>>32|1))%m)] = true
		}
		f.Add(h)
		if got := setBits(f); !slices.Equal(got, slices.Sorted(maps.Keys(want))) {
			t.Fatalf("hash %d in %d bits, %d each: %d, want %d", h, m, k, got, slices.Sorted(maps.Keys(want)))
		}
	}
}

// chained returns sequence hashes in the form of prompts: chains of 64.
func chained(n int, seed uint64) []uint64 {
	rng := rand.New(rand.NewPCG(seed, 3))
	out := make([]uint64, n)
	for i := range out {
		if out[i] = rng.Uint64(); i%64 > 0 {
			out[i] = indexer.NextSequenceHash(out[i-1], out[i])
		}
	}
	return out
}

// Added hashes are found. Other hashes are found at the rate that Bloom filters promise,
// counted on hashes of the same kind. Filters with more hashes than they were made for
// are worse only by the computed factor.
func TestFilterFindsLittleThatWasNotAdded(t *testing.T) {
	const asked = 200_000
	for _, c := range []struct{ size, added int }{{1000, 1000}, {40_000, 40_000}, {250_000, 250_000}, {40_000, 52_000}, {40_000, 80_000}, {40_000, 4000}} {
		t.Run(fmt.Sprintf("%d of %d", c.added, c.size), func(t *testing.T) {
			f := indexer.NewFilter(c.size)
			in := chained(c.added, 1)
			for _, h := range in {
				f.Add(h)
			}
			for _, h := range in {
				if !f.Has(h) {
					t.Fatalf("%d was added and is not found", h)
				}
			}
			found := 0
			for _, h := range chained(asked, 2) {
				if f.Has(h) {
					found++
				}
			}
			want := math.Pow(1-math.Exp(-7*float64(c.added)/float64(f.Bits())), 7)
			// The limit has three parts: chance, the chance within one filter, and the
			// dependence of a hash's bits, which come from two numbers.
			off := 4*math.Sqrt(want/asked) + .1*want
			if got := float64(found) / asked; math.Abs(got-want) > off {
				t.Errorf("%.4f of others are found, want %.4f ± %.4f", got, want, off)
			}
			if est := f.FalsePositives(); math.Abs(est-want) > .1*want+1e-9 {
				t.Errorf("it expects to find %.4f of others, want %.4f", est, want)
			}
			// Hashes that were already found before they were added are not counted.
			if n := f.Count(); n > c.added || float64(n) < float64(c.added)*(1-want)-1 {
				t.Errorf("count %d, want %d and at most %.3f of it less", n, c.added, want)
			}
			t.Logf("%d bits, %.2f %% found", f.Bits(), 100*float64(found)/asked)
		})
	}
}

// A filter of any size reports when it has too many hashes.
func TestFilterIsOverfull(t *testing.T) {
	for _, size := range []int{0, 100, 10_000} {
		f := indexer.NewFilter(size)
		n := 0
		for _, h := range chained(20_000, 1) {
			if f.Overfull() {
				break
			}
			f.Add(h)
			n++
		}
		if room := f.Bits() / 10; n < room*5/4 || n > room*4/3+1 {
			t.Errorf("a filter of %d bits takes %d hashes", f.Bits(), n)
		}
		if rate := f.FalsePositives(); size > 0 && (rate < .015 || rate > .035) {
			t.Errorf("a filter of %d bits is overfull when it finds %.4f of others", f.Bits(), rate)
		}
	}
}

func TestFilterOverlap(t *testing.T) {
	seq := chained(40, 7)
	f := indexer.NewFilter(1000)
	for _, depth := range []int{4, 8, 12, 20} {
		f.Add(seq[depth-1])
	}
	for _, c := range []struct {
		what   string
		seq    []uint64
		stride int
		want   int
	}{
		{"up to the hole", seq, 4, 12},
		{"up to the end of the prompt, in whole strides", seq[:11], 4, 8},
		{"a prompt shorter than a stride", seq[:3], 4, 0},
		{"no prompt", nil, 4, 0},
		{"a prompt of one stride", seq[:4], 4, 4},
		{"another one", chained(40, 8), 4, 0},
		{"a finer stride meets a hole at once", seq, 1, 0},
		{"a coarser stride", seq, 12, 12},
	} {
		if got := f.Overlap(c.seq, c.stride); got != c.want {
			t.Errorf("%s: %d blocks, want %d", c.what, got, c.want)
		}
	}
}

// The count with leaps equals the count one by one, wherever the known beginning of a
// prompt ends, except for a few false positives. It is never lower, whatever hashes are
// missing.
func TestFilterOverlapLeaps(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	const tries, stride = 20_000, 2
	f := indexer.NewFilter(1000 * stride)
	for _, h := range chained(1000*stride, 3) { // hashes of other prompts
		f.Add(h)
	}
	oneByOne := func(seq []uint64) (blocks int) {
		for blocks+stride <= len(seq) && f.Has(seq[blocks+stride-1]) {
			blocks += stride
		}
		return blocks
	}
	more, ends := 0, map[int]bool{}
	for range tries {
		n := rng.IntN(600)
		seq, held := make([]uint64, n), 0
		for i := range seq {
			seq[i] = rng.Uint64()
		}
		if n > 0 {
			held = rng.IntN(n+1) / stride
		}
		x := indexer.NewFilter(4000)
		for i := 1; i <= held; i++ {
			x.Add(seq[i*stride-1])
		}
		if got := x.Overlap(seq, stride); got < held*stride {
			t.Fatalf("%d blocks of %d, want %d", got, n, held*stride)
		} else if got > held*stride {
			more++
		}
		ends[held] = true
		// In a filter that is as full as allowed, any further checkpoint is found only by
		// chance.
		if got, want := f.Overlap(seq, stride), oneByOne(seq); got < want {
			t.Fatalf("%d blocks, one by one %d", got, want)
		}
	}
	if more > tries/10_000 || len(ends) < 290 {
		t.Errorf("%d of %d are too long; %d ends", more, tries, len(ends))
	}
}

// In a filter at its capacity, two adjacent false positives add little to the length of a
// prompt.
func TestFilterOverlapIsSeldomTooLong(t *testing.T) {
	const stride, held, prompts = 1, 100, 2000
	f := indexer.NewFilter(40_000)
	for _, h := range chained(40_000-held, 1) {
		f.Add(h)
	}
	begin := chained(held, 5)
	for _, h := range begin {
		f.Add(h)
	}
	tooLong, excess := 0, 0
	for i := range prompts {
		seq := append(slices.Clone(begin), chained(1500, uint64(i)+100)...)
		if got := f.Overlap(seq, stride) - held; got > 0 {
			tooLong, excess = tooLong+1, excess+got
		}
	}
	t.Logf("%d of %d prompts are too long, by %.2f checkpoints in the mean", tooLong, prompts, float64(excess)/prompts)
	// Counted one by one, .008 of the prompts would be too long, by .008 in the mean.
	if tooLong > prompts/50 || float64(excess)/prompts > .5 {
		t.Errorf("%d of %d prompts are too long, by %d checkpoints in all", tooLong, prompts, excess)
	}
}

func TestFilterSizes(t *testing.T) {
	for _, c := range []struct{ n, bits int }{
		{-5, 64},
		{0, 64},
		{1, 64},
		{6, 64},
		{7, 128},
		{64, 640},
		{250_000, 2_500_032},
		{math.MaxInt, 1 << 30},
		{107_374_183, 1 << 30},
		{math.MinInt, 64},
	} {
		if got := indexer.NewFilter(c.n).Bits(); got != c.bits {
			t.Errorf("for %d hashes: %d bits, want %d", c.n, got, c.bits)
		}
	}
}

func TestParseFilterRefuses(t *testing.T) {
	for _, c := range []struct {
		m, k, n uint64
		bytes   int
		want    string
	}{
		{0, 7, 0, 0, "0 bits, want a multiple of 64"},
		{100, 7, 0, 13, "100 bits, want a multiple of 64"},
		{1<<30 + 64, 7, 0, 8, "1073741888 bits, want a multiple of 64 up to 1073741824"},
		{1 << 63, 7, 0, 8, "bits, want a multiple of 64 up to 1073741824"},
		{64, 0, 0, 8, "0 bits a hash, want 1 to 16"},
		{64, 17, 0, 8, "17 bits a hash, want 1 to 16"},
		{64, 7, 1025, 8, "1025 hashes in 64 bits"},
		{64, 7, 0, 7, "7 bytes of data, want 8"},
		{64, 7, 0, 16, "16 bytes of data, want 8"},
		{1 << 30, 7, 0, 8, "8 bytes of data, want 134217728"},
	} {
		f, err := indexer.ParseFilter(c.m, c.k, c.n, make([]byte, c.bytes))
		if err == nil || f != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, %v", c, f, err)
		}
	}
}

// FuzzParseFilter parses filters of any numbers and bytes. Parsing either fails with an
// error or returns a usable filter that is the same after writing and parsing it again.
func FuzzParseFilter(f *testing.F) {
	f.Add(uint64(64), uint64(7), uint64(3), []byte("12345678"), uint64(5))
	f.Add(uint64(128), uint64(16), uint64(0), make([]byte, 16), uint64(1)<<40)
	f.Add(uint64(1024), uint64(7), uint64(1), make([]byte, 100), uint64(0))
	f.Add(uint64(1<<63), uint64(1), uint64(1), []byte{}, uint64(0))
	f.Fuzz(func(t *testing.T, m, k, n uint64, data []byte, h uint64) {
		x, err := indexer.ParseFilter(m, k, n, data)
		if err != nil {
			return
		}
		if uint64(x.Bits()) != m || uint64(x.Hashes()) != k || uint64(x.Count()) != n {
			t.Fatalf("%d bits, %d a hash, %d hashes; want %d, %d, %d", x.Bits(), x.Hashes(), x.Count(), m, k, n)
		}
		if again := x.AppendTo(nil); !slices.Equal(again, data) {
			t.Fatalf("%x, want %x", again, data)
		}
		had := x.Has(h)
		x.Add(h)
		if now := x.Count() - int(n); !x.Has(h) || had != (now == 0) || now > 1 {
			t.Fatalf("before adding %d: found %v; after adding: found %v, and %d more", h, had, x.Has(h), now)
		}
		if rate := x.FalsePositives(); rate < 0 || rate > 1 {
			t.Fatalf("a share of %f", rate)
		}
		if got := x.Overlap([]uint64{h, h, h}, 2); got != 2 {
			t.Fatalf("overlap of %d blocks, want 2", got)
		}
	})
}

// One goroutine adds while another reads, as a summary's receiver and decisions do.
func TestFilterIsAskedWhileItGrows(t *testing.T) {
	f := indexer.NewFilter(20_000)
	in := chained(20_000, 1)
	added := make(chan int, len(in))
	go func() {
		defer close(added)
		for i, h := range in {
			f.Add(h)
			added <- i
		}
	}()
	for i := range added {
		if !f.Has(in[i]) {
			t.Fatalf("hash %d was added and is not found", i)
		}
	}
}

// checkpoints returns the blocks that the model's workers hold on the device at depths
// that stride divides.
func (m *model) checkpoints(stride int) map[uint64]int {
	out := map[uint64]int{}
	for w := range m.workers {
		for _, chain := range m.owner(w, indexer.Device).held {
			if len(m.locals(chain))%stride == 0 {
				out[m.sequence(chain)] = 1
			}
		}
	}
	return out
}

// The checkpoints equal those of the model at the moment when the loop begins, for events
// of any shape: changes during the loop have no effect.
func TestCheckpointsAreOfAllWorkersAtOneMoment(t *testing.T) {
	for i, s := range shapes() {
		rng := rand.New(rand.NewPCG(uint64(i), 31))
		x, m := indexer.New(indexer.Config{}), newModel(s.workers)
		event := func() {
			w := rng.IntN(s.workers)
			ev := s.event(rng, m, w)
			m.apply(w, ev)
			x.Apply(w, ev)
		}
		for range 12 {
			for range 60 {
				event()
			}
			stride := 1 + rng.IntN(6)
			want, got := m.checkpoints(stride), map[uint64]int{}
			for h, err := range x.Checkpoints(stride) {
				if err != nil {
					t.Fatal(err)
				}
				if got[h]++; rng.IntN(3) == 0 && len(got) < 100 {
					event()
				}
			}
			if !maps.Equal(got, want) {
				t.Fatalf("shape %d, stride %d: %d checkpoints, want %d", i, stride, len(got), len(want))
			}
		}
	}
}

// Leaving the loop early leaves no state behind: the next loop and events work.
func TestCheckpointsMayBeLeft(t *testing.T) {
	x := filled(50, indexer.Config{})
	whole := 0
	for range x.Checkpoints(4) {
		whole++
	}
	if whole == 0 {
		t.Fatal("no checkpoints at all")
	}
	for range x.Checkpoints(4) {
		break
	}
	n := 0
	for _, err := range x.Checkpoints(4) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != whole {
		t.Errorf("%d checkpoints, want %d", n, whole)
	}
}

// A reader of checkpoints gets an error if changes overtake it, as readers of dumps do.
func TestCheckpointsCanBeOvertaken(t *testing.T) {
	x := filled(2000, indexer.Config{DumpWords: 1})
	var last error
	for _, err := range x.Checkpoints(4) {
		if last = err; err == nil {
			x.RemoveWorker(0)
		}
	}
	if last == nil {
		t.Error("no error, though more changed than is kept")
	}
}

func BenchmarkFilter(b *testing.B) {
	f := indexer.NewFilter(500_000)
	in, out := chained(500_000, 1), chained(500_000, 2)
	for _, h := range in {
		f.Add(h)
	}
	b.Run("present", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			f.Has(in[i%len(in)])
		}
	})
	b.Run("absent", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			f.Has(out[i%len(out)])
		}
	})
	b.Run("overlap of 512 blocks", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			at := i % 3000 * 128
			f.Overlap(in[at:at+128], 1)
		}
	})
}

// BenchmarkCheckpoints reads the checkpoints of a group of 8 and of 100 workers of 20,000
// blocks, with a third of the blocks in common, and the changes since.
func BenchmarkCheckpoints(b *testing.B) {
	for _, workers := range []int{8, 100} {
		x := indexer.New(indexer.Config{})
		rng := rand.New(rand.NewPCG(1, 1))
		for w := range workers {
			for c := range 20_000 / 400 { // chains of 400 blocks
				var chain []indexer.Block
				source := rng
				if c%3 == 0 {
					source = rand.New(rand.NewPCG(uint64(c), 9))
				}
				for range 400 {
					chain = append(chain, indexer.Block{Local: source.Uint64(), External: source.Uint64() + uint64(w)})
				}
				x.Apply(w, indexer.Event{Kind: indexer.Stored, Blocks: chain})
			}
		}
		f := indexer.NewFilter(x.Blocks() / 4)
		b.Run(fmt.Sprintf("%d workers", workers), func(b *testing.B) {
			n := 0
			for b.Loop() {
				n = 0
				for h := range x.Checkpoints(4) {
					f.Add(h)
					n++
				}
			}
			b.ReportMetric(float64(n), "hashes")
		})
		b.Run(fmt.Sprintf("%d workers, difference", workers), func(b *testing.B) {
			for b.Loop() {
				for h := range x.Checkpoints(4) {
					if !f.Has(h) {
						b.Fatal("a hash that was added is not found")
					}
				}
			}
		})
	}
}
