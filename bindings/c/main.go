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

// integer is a type of C's or Go's integers.
type integer interface{ ~int | ~uint32 | ~uint64 }

// use calls do with the publisher of a handle. It returns -1 and passes an error on if there is no
// such publisher, or if do fails.
func use(handle C.uint64_t, failure **C.char, do func(p *bindings.Publisher) error) C.int {
	return fail(guard(func() error {
		publishers.mu.Lock()
		p := publishers.open[uint64(handle)]
		publishers.mu.Unlock()
		if p == nil {
			return fmt.Errorf("there is no open publisher %d", uint64(handle))
		}
		return do(p)
	}), failure)
}

// list returns a copy of a C array as values of another integer type.
func list[To, From integer](first *From, n C.size_t) ([]To, error) {
	switch {
	case n == 0:
		return nil, nil
	case first == nil:
		return nil, fmt.Errorf("a list of %d elements is NULL", uint64(n))
	case n > 1<<28:
		return nil, fmt.Errorf("a list of %d elements", uint64(n))
	}
	all := make([]To, int(n))
	for i, v := range unsafe.Slice(first, int(n)) {
		all[i] = To(v)
	}
	return all, nil
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
	published := C.int64_t(-1)
	use(handle, failure, func(p *bindings.Publisher) (err error) {
		s := bindings.Stored{DPRank: uint32(dpRank), LoRAName: text(loraName), CacheSalt: text(cacheSalt)}
		var errs [3]error
		s.TokenIDs, errs[0] = list[uint32](tokenIDs, tokens)
		s.NumBlockTokens, errs[1] = list[int](numBlockTokens, blocks)
		s.BlockHashes, errs[2] = list[uint64](blockHashes, blocks)
		if err := errors.Join(errs[:]...); err != nil {
			return err
		}
		if parentHash != nil {
			s.ParentHash, s.HasParent = uint64(*parentHash), true
		}
		n, err := p.PublishStored(s)
		if err == nil {
			published = C.int64_t(n)
		}
		return err
	})
	return published
}

//export kvroute_publisher_removed
func kvroute_publisher_removed(
	handle C.uint64_t, dpRank C.uint32_t, blockHashes *C.uint64_t, blocks C.size_t, failure **C.char,
) C.int {
	return use(handle, failure, func(p *bindings.Publisher) error {
		hashes, err := list[uint64](blockHashes, blocks)
		if err != nil {
			return err
		}
		return p.PublishRemoved(uint32(dpRank), hashes)
	})
}

//export kvroute_publisher_cleared
func kvroute_publisher_cleared(handle C.uint64_t, dpRank C.uint32_t, failure **C.char) C.int {
	return use(handle, failure, func(p *bindings.Publisher) error { return p.PublishCleared(uint32(dpRank)) })
}

//export kvroute_publisher_load
func kvroute_publisher_load(
	handle C.uint64_t, running, waiting, kvUsedBlocks C.uint32_t, kvUtilization C.double, failure **C.char,
) C.int {
	return use(handle, failure, func(p *bindings.Publisher) error {
		p.SetLoad(fleet.Load{
			Running: int(running), Waiting: int(waiting), KVUsedBlocks: int(kvUsedBlocks), KVUtilization: float64(kvUtilization),
		})
		return nil
	})
}

//export kvroute_publisher_close
func kvroute_publisher_close(handle C.uint64_t, failure **C.char) C.int {
	return use(handle, failure, func(p *bindings.Publisher) error {
		publishers.mu.Lock()
		delete(publishers.open, uint64(handle))
		publishers.mu.Unlock()
		return p.Close()
	})
}

//export kvroute_free
func kvroute_free(s *C.char) { C.free(unsafe.Pointer(s)) }

func main() {}
