// SPDX-License-Identifier: Apache-2.0

package records_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/records"
)

const magic = "KVRTEST1"

func file(t testing.TB, payloads ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := records.NewWriter(&out, records.Header{Magic: magic, Version: 3, Body: [48]byte{7}})
	for i, p := range payloads {
		if err := w.Record(byte(i), func(b []byte) []byte { return append(b, p...) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(99); err != nil || w.Bytes() != int64(out.Len()) {
		t.Fatalf("%v, %d bytes, want %d", err, w.Bytes(), out.Len())
	}
	return out.Bytes()
}

func read(data io.Reader, version uint16) (got []string, r *records.Reader, err error) {
	r, h, err := records.NewReader(data, magic, version)
	if err != nil {
		return nil, nil, err
	}
	if h.Body[0] != 7 {
		return nil, nil, fmt.Errorf("the body begins with %d", h.Body[0])
	}
	for {
		kind, payload, err := r.Next()
		if errors.Is(err, io.EOF) {
			return got, r, nil
		}
		if err != nil {
			return got, r, err
		}
		got = append(got, fmt.Sprint(kind, " ", string(payload)))
	}
}

// A written file is read back unchanged. A changed, truncated or extended file is refused.
func TestAFileIsWholeOrRefused(t *testing.T) {
	good := file(t, "a", "", strings.Repeat("long ", 40))
	got, r, err := read(bytes.NewReader(good), 3)
	if err != nil || len(got) != 3 || got[0] != "0 a" || got[1] != "1 " || r.Count() != 99 || r.Records() != 3 {
		t.Fatalf("%q, %v", got, err)
	}
	for i := range good {
		damaged := bytes.Clone(good)
		damaged[i] ^= 1 << (i % 8)
		if _, _, err := read(bytes.NewReader(damaged), 3); !errors.Is(err, records.ErrBad) {
			t.Errorf("byte %d changed: %v", i, err)
		}
		if _, _, err := read(bytes.NewReader(good[:i]), 3); !errors.Is(err, records.ErrBad) {
			t.Errorf("cut at %d: %v", i, err)
		}
	}
	if _, _, err := read(bytes.NewReader(append(bytes.Clone(good), 0)), 3); !errors.Is(err, records.ErrBad) {
		t.Errorf("with a byte more: %v", err)
	}
	broken := errors.New("broken")
	for _, n := range []int{0, 30, 70, len(good)} {
		if _, _, err := read(io.MultiReader(bytes.NewReader(good[:n]), failing{broken}), 3); !errors.Is(err, broken) || errors.Is(err, records.ErrBad) {
			t.Errorf("an error of the disk after %d bytes becomes %v", n, err)
		}
	}
}

// The error names the actual kind of the file, also for older forms that are shorter than a
// header.
func TestOtherFilesAreNamed(t *testing.T) {
	for want, data := range map[string][]byte{
		`it begins with "KVRGUES2", want "KVRTEST1"`: []byte("KVRGUES2 and more"),
		`its version is 3, want 4`:                   file(t),
		`it ends in the middle`:                      []byte("KVR"),
	} {
		version := uint16(4)
		if _, _, err := read(bytes.NewReader(data), version); !errors.Is(err, records.ErrBad) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

func TestTooLargeRecords(t *testing.T) {
	w := records.NewWriter(io.Discard, records.Header{Magic: magic})
	large := func(b []byte) []byte { return append(b, make([]byte, records.Max+1)...) }
	if err := w.Record(1, large); err == nil {
		t.Error("a record above the bound is written")
	}
	if err := w.Close(0); err == nil {
		t.Error("a file with an error is closed as if it were whole")
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error)  { return 0, f.err }
func (f failing) Write([]byte) (int, error) { return 0, f.err }

// A file that cannot be written leaves the previous one unchanged.
func TestAFileReplacesTheOneBefore(t *testing.T) {
	dir, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	content := func() string {
		b, err := dir.ReadFile("f")
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	say := func(s string) func(io.Writer) error {
		return func(w io.Writer) error { _, err := io.WriteString(w, s); return err }
	}
	for _, s := range []string{"one, which is longer", "two"} {
		if err := records.WriteFile(dir, "f", say(s)); err != nil || content() != s {
			t.Errorf("%v, %q, want %q", err, content(), s)
		}
	}
	broken := errors.New("broken")
	if err := records.WriteFile(dir, "f", func(w io.Writer) error { return errors.Join(say("th")(w), broken) }); !errors.Is(err, broken) || content() != "two" {
		t.Errorf("%v, %q, want that of before", err, content())
	}
	w := records.NewWriter(failing{broken}, records.Header{Magic: magic})
	if err := w.Close(0); !errors.Is(err, broken) {
		t.Errorf("an error of the disk becomes %v", err)
	}
}
