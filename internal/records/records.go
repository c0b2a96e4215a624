// SPDX-License-Identifier: Apache-2.0

// Package records is the format of every file that kvroute keeps for a restart: snapshots of
// the stream, and the files of --state-dir.
//
// A file is little endian:
//
//   - a header of 64 bytes: magic (8), version (u16), flags (u16, 0), 48 bytes for the kind of
//     file, and a CRC-32C of these;
//   - records: type (u8), length of the payload (u32), payload of at most 1 MiB, and a CRC-32C
//     of these three;
//   - a last record of type 255 with three u64: the number of records before it, a number for
//     the kind of file, and the XXH3 of all bytes before it.
//
// A reader refuses a whole file that is cut off, changed, or of another kind or version. The
// magic changes when an older reader could misread the file.
//
// Both directions are streams and keep one record in memory. A Writer and a Reader
// belong to one goroutine each.
package records

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/zeebo/xxh3"
)

const (
	// End is the type of the last record. The others are the file's own.
	End = 255
	// Max is the largest payload in bytes.
	Max = 1 << 20

	recordData = 1 // see [Writer.Write]
	dataPiece  = 1 << 18

	headerSize = 64
	bodyAt     = 12
	bodySize   = 48
	frame      = 5 // type and length before a payload
)

// ErrBad is wrapped by errors about bytes that are no complete file of the requested kind. It
// is not wrapped by errors of the underlying reader.
var ErrBad = errors.New("not a good file")

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrBad}, args...)...)
}

// Header is the beginning of a file. Each kind of file defines its Body.
type Header struct {
	Magic   string // 8 bytes
	Version uint16
	Body    [bodySize]byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli) //nolint:gochecknoglobals // a table

// Writer writes a file. After an error it writes nothing more.
type Writer struct {
	w       *bufio.Writer
	digest  *xxh3.Hasher
	bytes   int64
	records uint64
	buf     []byte
	err     error
}

// NewWriter begins a file. It buffers the header.
func NewWriter(w io.Writer, h Header) *Writer {
	out := &Writer{w: bufio.NewWriterSize(w, 1<<18), digest: xxh3.New()}
	b := append(make([]byte, 0, headerSize), h.Magic...)
	b = binary.LittleEndian.AppendUint16(b, h.Version)
	b = append(binary.LittleEndian.AppendUint16(b, 0), h.Body[:]...)
	out.write(binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli)))
	return out
}

func (w *Writer) write(b []byte) {
	if w.err != nil {
		return
	}
	w.bytes += int64(len(b))
	_, _ = w.digest.Write(b) // never fails
	_, w.err = w.w.Write(b)
}

// Record writes a record whose payload is what payload appends.
func (w *Writer) Record(kind byte, payload func([]byte) []byte) error {
	b := payload(append(w.buf[:0], kind, 0, 0, 0, 0))
	if n := len(b) - frame; n > Max {
		if w.err == nil {
			w.err = fmt.Errorf("a record of type %d has %d bytes, at most %d are allowed", kind, n, Max)
		}
		return w.err
	}
	binary.LittleEndian.PutUint32(b[1:], uint32(len(b)-frame))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	w.buf = b
	w.records++
	w.write(b)
	return w.err
}

// Write writes data in records of one type, which [Reader.Read] reads. A file has such
// records only.
func (w *Writer) Write(data []byte) (int, error) {
	for piece := range slices.Chunk(data, dataPiece) {
		if err := w.Record(recordData, func(b []byte) []byte { return append(b, piece...) }); err != nil {
			return 0, err
		}
	}
	return len(data), nil
}

// Close ends the file with a number that the kind of file defines. It does not close the
// underlying writer.
func (w *Writer) Close(count uint64) error {
	records, digest := w.records, w.digest.Sum64()
	if err := w.Record(End, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint64(b, records)
		b = binary.LittleEndian.AppendUint64(b, count)
		return binary.LittleEndian.AppendUint64(b, digest)
	}); err != nil {
		return err
	}
	w.err = w.w.Flush()
	return w.err
}

// Bytes returns how many bytes were written.
func (w *Writer) Bytes() int64 { return w.bytes }

// Reader reads a file.
type Reader struct {
	r       *bufio.Reader
	digest  *xxh3.Hasher
	records uint64
	count   uint64
	buf     []byte
	data    []byte // of the last record, not yet returned by Read
	err     error  // of Read
}

// NewReader reads a file's header, which must have this magic and version.
func NewReader(r io.Reader, magic string, version uint16) (*Reader, *Header, error) {
	in := &Reader{r: bufio.NewReaderSize(r, 1<<18), digest: xxh3.New()}
	b := make([]byte, headerSize)
	n, err := io.ReadFull(in.r, b)
	if got := string(b[:min(n, len(magic))]); got != magic && n >= len(magic) {
		// An older form may be shorter than the header.
		return nil, nil, bad("it begins with %q, want %q", got, magic)
	}
	if err != nil {
		return nil, nil, ended(err)
	}
	h := &Header{Magic: magic, Version: binary.LittleEndian.Uint16(b[8:]), Body: [bodySize]byte(b[bodyAt:])}
	flags := binary.LittleEndian.Uint16(b[10:])
	switch at := headerSize - 4; {
	case binary.LittleEndian.Uint32(b[at:]) != crc32.Checksum(b[:at], castagnoli):
		return nil, nil, bad("the checksum of the header is wrong")
	case h.Version != version:
		return nil, nil, bad("its version is %d, want %d", h.Version, version)
	case flags != 0:
		return nil, nil, bad("it has flags %#x, want none", flags)
	}
	_, _ = in.digest.Write(b) // never fails
	return in, h, nil
}

func ended(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return bad("it ends in the middle")
	}
	return err
}

// Next reads a record. Its payload is valid until the next call. After the last record of an
// unchanged file the error is [io.EOF].
func (r *Reader) Next() (kind byte, payload []byte, err error) {
	r.buf = slices.Grow(r.buf[:0], frame)[:frame]
	if _, err := io.ReadFull(r.r, r.buf); err != nil {
		return 0, nil, ended(err)
	}
	n := int(binary.LittleEndian.Uint32(r.buf[1:]))
	if n > Max {
		return 0, nil, bad("record %d has %d bytes, at most %d are allowed", r.records+1, n, Max)
	}
	end := frame + n
	r.buf = slices.Grow(r.buf, n+4)[:end+4]
	if _, err := io.ReadFull(r.r, r.buf[frame:]); err != nil {
		return 0, nil, ended(err)
	}
	if crc32.Checksum(r.buf[:end], castagnoli) != binary.LittleEndian.Uint32(r.buf[end:]) {
		return 0, nil, bad("the checksum of record %d is wrong", r.records+1)
	}
	if kind, payload = r.buf[0], r.buf[frame:end]; kind == End {
		return kind, nil, r.end(payload)
	}
	r.records++
	_, _ = r.digest.Write(r.buf) // never fails
	return kind, payload, nil
}

// Read reads what [Writer.Write] wrote. The error is [io.EOF] after the last record, if
// the whole file was unchanged.
func (r *Reader) Read(p []byte) (int, error) {
	for len(r.data) == 0 {
		kind, payload, err := r.Next()
		if err == nil && kind != recordData {
			err = bad("record %d is of type %d, want %d", r.records, kind, recordData)
		}
		if err != nil {
			r.err = err
			return 0, err
		}
		r.data = payload
	}
	n := copy(p, r.data)
	r.data = r.data[n:]
	return n, nil
}

// Err returns the error that ended Read, unless that is [io.EOF].
func (r *Reader) Err() error {
	if errors.Is(r.err, io.EOF) {
		return nil
	}
	return r.err
}

// end checks the last record against all others.
func (r *Reader) end(p []byte) error {
	if len(p) != 24 {
		return bad("its last record has %d bytes, want 24", len(p))
	}
	r.count = binary.LittleEndian.Uint64(p[8:])
	switch n := binary.LittleEndian.Uint64(p); {
	case n != r.records:
		return bad("it has %d records, want %d", r.records, n)
	case binary.LittleEndian.Uint64(p[16:]) != r.digest.Sum64():
		return bad("its digest is wrong")
	}
	switch _, err := r.r.ReadByte(); {
	case err == nil:
		return bad("something follows its last record")
	case !errors.Is(err, io.EOF):
		return err
	}
	return io.EOF
}

// Records returns how many records were read, without the last one.
func (r *Reader) Records() uint64 { return r.records }

// Count returns the number that was given to Close, after Next has returned [io.EOF].
func (r *Reader) Count() uint64 { return r.count }

// WriteFile replaces a file as a whole or not at all, even if the machine crashes: it writes
// another file, syncs it to the disk, and renames it.
func WriteFile(dir *os.Root, name string, write func(io.Writer) error) error {
	f, err := dir.OpenFile(name+".tmp", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return dir.Rename(name+".tmp", name)
}

// WriteJSON replaces a file by v as JSON, as a whole or not at all.
func WriteJSON(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	dir, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }() // only a handle
	return WriteFile(dir, filepath.Base(path), func(w io.Writer) error { _, err := w.Write(data); return err })
}
