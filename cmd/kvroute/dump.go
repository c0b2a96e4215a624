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
	resp, err := from.open(ctx, path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var last tail
	if _, err := io.Copy(io.MultiWriter(std.out, &last), resp.Body); err != nil {
		return err
	}
	if at := bytes.LastIndexByte(bytes.TrimSuffix(last, []byte("\n")), '\n'); !bytes.HasSuffix(last, []byte("\n")) || !bytes.HasPrefix(last[at+1:], []byte(dumpEnd)) {
		return errors.New("the dump ends in the middle")
	}
	return nil
}

// dumpEnd begins the last line of a dump, which is a short one.
const dumpEnd = `{"kvroute_end":`

// tail keeps the last bytes that are written to it.
type tail []byte

func (t *tail) Write(b []byte) (int, error) {
	*t = append(*t, b...)
	*t = append((*t)[:0], (*t)[max(0, len(*t)-256):]...)
	return len(b), nil
}
