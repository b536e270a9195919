"""Models of other libraries, as their users have them: does the cutter take them, and how much crosses?"""
