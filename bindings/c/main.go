// SPDX-License-Identifier: Apache-2.0

// Package main is the C library libkvroute_publisher; kvroute_publisher.h is its
// manual. It is the only part of kvroute that needs a C compiler:
//
//	go build -buildmode=c-shared -o libkvroute_publisher.so ./bindings/c
package main

// #include <stddef.h>
// #include <stdint.h>
// #include <stdlib.h>
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/kvroute/kvroute/bindings"
	"github.com/kvroute/kvroute/fleet"
)

// publishers are the open publishers by handle. A handle is a number, so that a wrong one is
// an error and not a crash.
//
//nolint:gochecknoglobals // C has no other place for them
var publishers = struct {
	mu   sync.Mutex
	next uint64
	open map[uint64]*bindings.Publisher
}{open: make(map[uint64]*bindings.Publisher)}

func find(handle C.uint64_t) (*bindings.Publisher, error) {
	publishers.mu.Lock()
	defer publishers.mu.Unlock()
	p := publishers.open[uint64(handle)]
	if p == nil {
		return nil, fmt.Errorf("there is no open publisher %d", uint64(handle))
	}
	return p, nil
}

// fail passes an error to C, if there is one and C has a place for it.
func fail(err error, text **C.char) C.int {
	if err == nil {
		return 0
	}
	if text != nil {
		*text = C.CString(err.Error())
	}
	return -1
}

// guard turns a panic into an error, since the process belongs to the engine.
func guard(do func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return do()
}

// list returns a C array, which is valid during the call only.
func list[T any](first *T, n C.size_t) ([]T, error) {
	switch {
	case n == 0:
		return nil, nil
	case first == nil:
		return nil, fmt.Errorf("a list of %d elements is NULL", uint64(n))
	case n > 1<<28:
		return nil, fmt.Errorf("a list of %d elements", uint64(n))
	}
	return unsafe.Slice(first, int(n)), nil
}

func text(s *C.char) string {
	if s == nil {
		return ""
	}
	return C.GoString(s)
}

//export kvroute_publisher_open
func kvroute_publisher_open(config *C.char, failure **C.char) C.uint64_t {
	var handle uint64
	err := guard(func() error {
		c, err := bindings.ParseConfig([]byte(text(config)))
		if err != nil {
			return err
		}
		p, err := bindings.Open(c)
		if err != nil {
			return err
		}
		publishers.mu.Lock()
		defer publishers.mu.Unlock()
		publishers.next++
		handle = publishers.next
		publishers.open[handle] = p
		return nil
	})
	fail(err, failure)
	return C.uint64_t(handle)
}

//export kvroute_publisher_stored
func kvroute_publisher_stored(
	handle C.uint64_t, dpRank C.uint32_t, tokenIDs *C.uint32_t, tokens C.size_t,
	numBlockTokens *C.uint32_t, blockHashes *C.uint64_t, blocks C.size_t, parentHash *C.uint64_t,
	loraName, cacheSalt *C.char, failure **C.char,
) C.int64_t {
	told := 0
	err := guard(func() error {
		p, err := find(handle)
		if err != nil {
			return err
		}
		ids, err1 := list(tokenIDs, tokens)
		sizes, err2 := list(numBlockTokens, blocks)
		hashes, err3 := list(blockHashes, blocks)
		if err := errors.Join(err1, err2, err3); err != nil {
			return err
		}
		s := bindings.Stored{DPRank: uint32(dpRank), LoRAName: text(loraName), CacheSalt: text(cacheSalt)}
		s.TokenIDs = make([]uint32, len(ids))
		for i, t := range ids {
			s.TokenIDs[i] = uint32(t)
		}
		s.NumBlockTokens, s.BlockHashes = make([]int, len(sizes)), make([]uint64, len(hashes))
		for i := range hashes {
			s.NumBlockTokens[i], s.BlockHashes[i] = int(sizes[i]), uint64(hashes[i])
		}
		if parentHash != nil {
			s.ParentHash, s.HasParent = uint64(*parentHash), true
		}
		told, err = p.PublishStored(s)
		return err
	})
	if err != nil {
		return C.int64_t(fail(err, failure))
	}
	return C.int64_t(told)
}

//export kvroute_publisher_removed
func kvroute_publisher_removed(handle C.uint64_t, dpRank C.uint32_t, blockHashes *C.uint64_t, blocks C.size_t, failure **C.char) C.int {
	return fail(guard(func() error {
		p, err := find(handle)
		if err != nil {
			return err
		}
		named, err := list(blockHashes, blocks)
		if err != nil {
			return err
		}
		hashes := make([]uint64, len(named))
		for i, h := range named {
			hashes[i] = uint64(h)
		}
		return p.PublishRemoved(uint32(dpRank), hashes)
	}), failure)
}

//export kvroute_publisher_cleared
func kvroute_publisher_cleared(handle C.uint64_t, dpRank C.uint32_t, failure **C.char) C.int {
	return fail(guard(func() error {
		p, err := find(handle)
		if err != nil {
			return err
		}
		return p.PublishCleared(uint32(dpRank))
	}), failure)
}

//export kvroute_publisher_load
func kvroute_publisher_load(handle C.uint64_t, running, waiting, kvUsedBlocks C.uint32_t, kvUtilization C.double, failure **C.char) C.int {
	return fail(guard(func() error {
		p, err := find(handle)
		if err != nil {
			return err
		}
		p.SetLoad(fleet.Load{Running: int(running), Waiting: int(waiting), KVUsedBlocks: int(kvUsedBlocks), KVUtilization: float64(kvUtilization)})
		return nil
	}), failure)
}

//export kvroute_publisher_close
func kvroute_publisher_close(handle C.uint64_t, failure **C.char) C.int {
	return fail(guard(func() error {
		p, err := find(handle)
		if err != nil {
			return err
		}
		publishers.mu.Lock()
		delete(publishers.open, uint64(handle))
		publishers.mu.Unlock()
		return p.Close()
	}), failure)
}

//export kvroute_free
func kvroute_free(s *C.char) { C.free(unsafe.Pointer(s)) }

func main() {}
