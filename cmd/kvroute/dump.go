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
	fs := newFlagSet("dump")
	var from apiClient
	from.flags(fs)
	if err := errors.Join(parse(fs, args), from.readToken()); err != nil {
		return err
	}
	resp, err := from.open(ctx, "/v1/index/dump", "")
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
