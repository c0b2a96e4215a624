// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
)

// dump prints the index of a running kvroute.
func dump(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("dump", std.err)
	var from apiClient
	from.flags(fs)
	sorted := fs.Bool("sort", false, "one block a line, in an order that two replicas agree on")
	if err := errors.Join(parse(fs, args), from.readToken()); err != nil {
		return err
	}
	path := "/v1/index/dump"
	if *sorted {
		path += "?sort=1"
	}
	resp, err := from.open(ctx, path, "")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return copyDump(std.out, resp.Body)
}

// copyDump copies a dump and fails if it has no last line: kvroute stopped writing it.
func copyDump(out io.Writer, dump io.Reader) error {
	var last tail
	if _, err := io.Copy(io.MultiWriter(out, &last), dump); err != nil {
		return err
	}
	if at := bytes.LastIndexByte(bytes.TrimSuffix(last, []byte("\n")), '\n'); !bytes.HasSuffix(last, []byte("\n")) || !bytes.HasPrefix(last[at+1:], []byte(dumpEnd)) {
		return errors.New("the dump is not complete: the client read too slowly, or kvroute ended")
	}
	return nil
}

// dumpEnd begins the last line of a dump, which is shorter than what tail keeps.
const dumpEnd = `{"kvroute_end":`

// tail keeps the last bytes that are written to it.
type tail []byte

func (t *tail) Write(b []byte) (int, error) {
	*t = append(*t, b...)
	*t = append((*t)[:0], (*t)[max(0, len(*t)-256):]...)
	return len(b), nil
}
