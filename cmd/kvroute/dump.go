// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
)

// dump prints the index of a running kvroute.
func dump(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("dump", std.err)
	var from apiFlags
	from.add(fs)
	sorted := fs.Bool("sort", false, "one block a line, in an order that two replicas agree on")
	if err := parse(fs, args); err != nil {
		return err
	}
	path := "/v1/index/dump"
	if *sorted {
		path += "?sort=1"
	}
	resp, err := from.get(ctx, path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	out := bufio.NewWriterSize(std.out, 64<<10)
	in := bufio.NewReaderSize(resp.Body, 64<<10)
	whole := false
	for {
		line, err := in.ReadSlice('\n') // or a part of a long one, which is an event's
		if len(line) > 0 {
			whole = bytes.HasPrefix(line, []byte(`{"kvroute_end":`)) && err == nil
		}
		if _, err := out.Write(line); err != nil {
			return err
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			break
		}
	}
	if err := out.Flush(); err != nil {
		return err
	}
	if !whole {
		return errors.New("the dump ends in the middle")
	}
	return nil
}
