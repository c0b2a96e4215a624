// SPDX-License-Identifier: Apache-2.0

package chat_test

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// A clone has the memory of no span of the request.
func TestCloneCopiesEachSpan(t *testing.T) {
	body := []byte("the body of a request")
	var q chat.Request
	spans := 0
	for field, value := range reflect.ValueOf(&q).Elem().Fields() {
		if field.Type == reflect.TypeFor[[]byte]() {
			value.SetBytes(body)
			spans++
		}
	}
	clone := q.Clone()
	for field, value := range reflect.ValueOf(clone).Fields() {
		if field.Type != reflect.TypeFor[[]byte]() {
			continue
		}
		if !bytes.Equal(value.Bytes(), body) || &value.Bytes()[0] == &body[0] {
			t.Errorf("%s is not copied", field.Name)
		}
	}
	if spans == 0 {
		t.Error("a request has no spans")
	}
}
