// SPDX-License-Identifier: Apache-2.0

package openai

// Mend makes JSON of the beginning of a JSON object that was cut off somewhere.
func Mend(body []byte) []byte {
	end := endOf(body)
	return end.with("", nil)
}
